"""The restart acceptance test on a live deployment: stores, restarts, asks again, and keeps the evidence."""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Callable

from ..core.deployment import Deployment
from ..core.errors import KvpError, UsageError
from ..core.recovery import (
    INCONCLUSIVE,
    SCENARIOS,
    Answer,
    Outcome,
    Restart,
    Store,
    judge,
    metric_sum,
    overall,
    prefetched_keys,
)
from .deployment import load_identity
from .files import drop_page_cache, read_json, write_atomic
from .health import Endpoint, cache_endpoint, engine_endpoint, wait_healthy
from .http import ask, get_text
from .identity import namespace_of
from .l2_tier import stored_bytes
from .processes import Process, block_device, device_read_bytes, storage_read_bytes
from .services import ServiceManager

RESULTS = "results"
RESULT_FILE = "recovery.json"

# Counters of lmcache 0.5.6 (lmcache/v1/mp_observability/subscribers/metrics), as Prometheus names.
_STORED_CHUNKS = "lmcache_mp_l2_store_completed_objects_chunks_total"
_DISK_TOKENS = "lmcache_mp_lookup_hit_l2_tokens_total"

_SETTLED_S = 3.0
# What is deployed answers at once; a busy host may take a few tries.
_DEPLOYED_S = 30.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What the test does.

    Attributes:
        scenarios: which of ``core.recovery.SCENARIOS``, in this order.
        prompt_tokens: about how long the prompt is; the engine's own count is in the result.
        max_tokens: length of the answer.
        expected_answer: text that a right answer contains; empty for a model that knows nothing.
        timeout_s: longest wait for one service to become healthy, and for one answer.
    """

    scenarios: tuple[str, ...] = SCENARIOS
    prompt_tokens: int = 2000
    max_tokens: int = 24
    expected_answer: str = ""
    timeout_s: float = 900.0


def run_recovery(deployment: Deployment, manager: ServiceManager, plan: Plan, report: Report) -> dict[str, Any]:
    """Runs the scenarios and writes the result.

    Args:
        report: told of each step, for people who wait.

    Returns:
        The content of the result file; its key ``folder`` says where it lies.

    Raises:
        UsageError: when the plan is impossible, before anything is touched.
        KvpError: when a service does not come back or the engine does not answer; the result file then says
            INCONCLUSIVE with that error.
    """
    check_plan(deployment, plan)
    namespace = namespace_of(deployment, load_identity(deployment.config_dir))
    folder = f"{deployment.state_dir}/{RESULTS}/{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-recovery"
    result: dict[str, Any] = {"namespace": namespace, "folder": folder, "plan": asdict(plan), "verdict": INCONCLUSIVE}
    run = _Run(deployment, manager, plan, report)
    try:
        result.update(run.all())
    except KvpError as error:
        result["error"] = str(error)
        raise
    finally:
        write_atomic(f"{folder}/{RESULT_FILE}", json.dumps(result, indent=2, ensure_ascii=False) + "\n", 0o600)
    return result


def check_plan(deployment: Deployment, plan: Plan) -> None:
    """Checks that a plan can be carried out on this deployment.

    Raises:
        UsageError: when it cannot.
    """
    unknown = sorted(set(plan.scenarios) - set(SCENARIOS))
    if unknown or not plan.scenarios:
        raise UsageError(
            "planning the recovery test", f"no scenario {', '.join(unknown) or 'given'}", "Use A, B or both."
        )
    if not deployment.engine.kv_persist:
        raise UsageError(
            "planning the recovery test", "the cache is not attached", "Deploy with vllm_engine_kv_persist=true."
        )


def last_result(state_dir: str) -> dict[str, Any]:
    """The newest result.

    Raises:
        UsageError: when there is none.
    """
    folder = f"{state_dir}/{RESULTS}"
    names = sorted(name for name in os.listdir(folder)) if os.path.isdir(folder) else []
    finished = [name for name in names if os.path.exists(f"{folder}/{name}/{RESULT_FILE}")]
    if not finished:
        raise UsageError(
            "reading the last recovery result", f"there is none in {folder}", "Run kvpersist recover first."
        )
    return read_json(f"{folder}/{finished[-1]}/{RESULT_FILE}")


def make_prompt(nonce: str, tokens: int) -> str:
    """A prompt that no earlier run has sent, of about ``tokens`` tokens, that ends in a question with one right answer.

    The nonce comes first, so that not even the first chunk of an earlier prompt matches.
    """
    draw = random.Random(nonce)  # noqa: S311  # text to fill a prompt, not a secret
    lines = [f"Logbook {nonce}. Read it, then answer the question at its end."]
    # A line takes about 22 tokens with the tokenizers of current models.
    for number in range(1, max(2, tokens // 22)):
        place = draw.choice(("north hall", "south hall", "old mill", "river dock", "east gate", "upper floor"))
        lines.append(
            f"{number}. At the {place} the meter showed {draw.randint(10, 99)} units "
            f"and the guard noted {draw.choice(('rain', 'wind', 'fog', 'sun', 'snow'))}."
        )
    lines.append("Question: What is the capital of France? Answer in one short sentence.")
    return "\n".join(lines)


class _Run:
    """One run of the test; its methods are the steps."""

    def __init__(self, deployment: Deployment, manager: ServiceManager, plan: Plan, report: Report) -> None:
        self._deployment = deployment
        self._manager = manager
        self._plan = plan
        self._report = report
        self._cache = cache_endpoint(deployment)
        self._engine = engine_endpoint(deployment)
        self._device = deployment.cache_device or block_device(deployment.cache.root)
        self._prompt = make_prompt(secrets.token_hex(8), plan.prompt_tokens)

    def all(self) -> dict[str, Any]:
        for endpoint in (self._cache, self._engine):
            wait_healthy(self._manager, endpoint, self._containerised, _DEPLOYED_S)
        self._warm_up()
        self._report(f"cold request, about {self._plan.prompt_tokens} tokens")
        cold, store = self._cold()
        self._report(f"cold TTFT {cold.ttft_s:.2f} s, {store.bytes_after - store.bytes_before} bytes stored")
        restarts: list[Restart] = []
        outcomes: list[Outcome] = []
        for scenario in self._plan.scenarios:
            restart = self._scenario(scenario)
            required = bool(self._deployment.cache_device)
            outcome = judge(cold, store, restart, self._plan.expected_answer, required)
            restarts.append(restart)
            outcomes.append(outcome)
            self._report(f"{scenario}: {outcome.verdict}, TTFT {restart.answer.ttft_s:.2f} s")
        return {
            "verdict": overall(outcomes),
            "cold": asdict(cold),
            "store": asdict(store),
            "restarts": [asdict(restart) for restart in restarts],
            "outcomes": [outcome.as_dict() for outcome in outcomes],
        }

    def _cold(self) -> tuple[Answer, Store]:
        bytes_before, chunks_before = self._bytes(), self._metric(_STORED_CHUNKS)
        cold = self._ask(self._prompt)
        self._wait_for_stores()
        return cold, Store(bytes_before, self._bytes(), self._metric(_STORED_CHUNKS) - chunks_before)

    def _scenario(self, scenario: str) -> Restart:
        engine_before = self._manager.process(self._engine.service)
        cache_before = self._manager.process(self._cache.service)
        if scenario == "B":
            self._report("B: engine stopped, cache server killed with SIGKILL, both started again")
            self._manager.stop(self._engine.service)
            self._manager.kill(self._cache.service)
            self._manager.start(self._cache.service)
            self._wait(self._cache)
            self._manager.start(self._engine.service)
        else:
            self._report("A: engine restarted, cache server kept")
            self._manager.restart(self._engine.service)
        engine_after = self._wait(self._engine)
        cache_after = self._manager.process(self._cache.service)
        self._warm_up()
        if scenario == "B":
            drop_page_cache(self._deployment.cache.root)
        return self._asked_again(scenario, engine_after != engine_before, cache_after != cache_before, cache_after)

    def _asked_again(
        self, scenario: str, engine_replaced: bool, cache_replaced: bool, cache: Process | None
    ) -> Restart:
        log_offset = _size(self._cache.log)
        bytes_before, tokens_before = self._bytes(), self._metric(_DISK_TOKENS)
        device_before = device_read_bytes(self._device) if self._device else None
        process_before = storage_read_bytes(cache.pid) if cache else None
        answer = self._ask(self._prompt)
        self._wait_for_stores()
        l1_keys, l2_keys = prefetched_keys(self._log_since(log_offset))
        return Restart(
            scenario=scenario,
            answer=answer,
            engine_replaced=engine_replaced,
            cache_replaced=cache_replaced,
            bytes_before=bytes_before,
            bytes_after=self._bytes(),
            l1_keys=l1_keys,
            l2_keys=l2_keys,
            l2_tokens=self._metric(_DISK_TOKENS) - tokens_before,
            device_bytes=_grown(device_before, device_read_bytes(self._device) if self._device else None),
            process_bytes=_grown(process_before, storage_read_bytes(cache.pid) if cache else None),
        )

    @property
    def _containerised(self) -> bool:
        return self._deployment.engine.launch_mode == "docker"

    def _wait(self, endpoint: Endpoint) -> Process:
        return wait_healthy(self._manager, endpoint, self._containerised, self._plan.timeout_s)

    def _warm_up(self) -> None:
        """The first request after a start compiles kernels; this one pays for it. Too short to be stored."""
        self._ask(f"Say hello. {secrets.token_hex(4)}")

    def _ask(self, prompt: str) -> Answer:
        engine = self._deployment.engine
        return ask(engine.url, engine.served_model_name, prompt, self._plan.max_tokens, self._plan.timeout_s)

    def _bytes(self) -> int:
        return stored_bytes(self._deployment.cache)[0]

    def _metric(self, name: str) -> int:
        return metric_sum(get_text(f"{self._deployment.cache.http_url}/metrics"), name)

    def _log_since(self, offset: int) -> str:
        try:
            with open(self._cache.log, "rb") as file:
                # A log that is shorter than before was rotated; what it holds now is newer than the offset.
                file.seek(offset if _size(self._cache.log) >= offset else 0)
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""  # no log is no evidence, which the verdict says

    def _wait_for_stores(self) -> None:
        """Stores are asynchronous: wait until nothing has moved for a while and nothing is left to be written."""
        deadline = time.monotonic() + self._plan.timeout_s
        seen: Sequence[int] = ()
        since = time.monotonic()
        while time.monotonic() < deadline:
            used, unwritten = stored_bytes(self._deployment.cache)
            now = (used, unwritten, self._metric(_STORED_CHUNKS))
            if now != seen or unwritten:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= _SETTLED_S:
                return
            time.sleep(0.25)


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
