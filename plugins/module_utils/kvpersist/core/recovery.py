"""The restart acceptance test: which evidence it needs and what follows from it. ``host.recovery`` collects it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import EXIT_ERROR, EXIT_INCONCLUSIVE, EXIT_OK

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"

# A: the engine is restarted, the cache server goes on. B: the cache server is killed with SIGKILL, both start again.
SCENARIOS = ("A", "B")

# lmcache 0.5.6, lmcache/v1/distributed/storage_manager.py, PrefetchHandle results at level INFO.
_PREFETCH = re.compile(
    r"Prefetch request completed \(L1\+L2\): (?P<hit>\d+)/(?P<asked>\d+) retained keys "
    r"\((?P<l1>\d+) L1, (?P<l2>\d+) L2\)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_METRIC = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(?P<value>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?:\s+\d+)?\Z"
)


@dataclass(frozen=True)
class Answer:
    """One request to the engine.

    Attributes:
        text: the answer, decoded greedily.
        ttft_s: seconds from sending the request to the first token.
        prompt_tokens, cached_tokens: the engine's own count; ``cached_tokens`` is None where it reports none.
    """

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True)
class Store:
    """Proof that the cold request reached the disk: L2 bytes before and after it, chunks stored by the adapter."""

    bytes_before: int
    bytes_after: int
    chunks: int


@dataclass(frozen=True)
class Restart:
    """What was seen of one restart and the request after it.

    Attributes:
        scenario: ``A`` or ``B``.
        answer: the answer to the same prompt.
        engine_replaced, cache_replaced: whether another process answers than before.
        bytes_before, bytes_after: L2 bytes around the request.
        l1_keys, l2_keys: keys that the server's log says came from L1 and from disk, after the restart.
        l2_tokens: tokens that the server's own counter says came from disk, after the restart.
        device_bytes: bytes the block device read meanwhile; None where the device is not known.
        process_bytes: bytes the cache server's process had fetched from storage; None where it cannot be read.
    """

    scenario: str
    answer: Answer
    engine_replaced: bool
    cache_replaced: bool
    bytes_before: int
    bytes_after: int
    l1_keys: int
    l2_keys: int
    l2_tokens: int
    device_bytes: int | None
    process_bytes: int | None


@dataclass(frozen=True)
class Outcome:
    """Verdict of one scenario with the reasons against PASS and what was missing."""

    scenario: str
    verdict: str
    failures: tuple[str, ...]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def judge(cold: Answer, store: Store, restart: Restart, expected: str, device_required: bool) -> Outcome:
    """The verdict of one scenario. Speed alone never passes; every piece of evidence counts.

    Args:
        cold: the uncached answer, baseline of text and time for a prompt of the same length (it is the same prompt).
        store: proof of the store before the restart.
        restart: what was seen afterwards.
        expected: text that a right answer contains; empty when no such text is known.
        device_required: whether the operator named a block device, so that its counters must speak.
    """
    failures = [*_cold_failures(cold, store, expected), *_reuse_failures(cold, restart)]
    missing = []
    if cold.cached_tokens is None or restart.answer.cached_tokens is None:
        missing.append("the engine reports no cached_tokens; start it with --enable-prompt-tokens-details")
    if restart.scenario == "B":
        failures.extend(_disk_failures(restart))
        if device_required and restart.device_bytes is None:
            missing.append("the counters of the block device (kvp_cache_device) could not be read")
        elif device_required and restart.device_bytes == 0:
            missing.append(
                "the block device (kvp_cache_device) read nothing: another device holds the cache, or a cache above it"
            )
    verdict = FAIL if failures else INCONCLUSIVE if missing else PASS
    return Outcome(restart.scenario, verdict, tuple(failures), tuple(missing))


def overall(outcomes: Sequence[Outcome]) -> str:
    """One verdict for several scenarios: the worst of them."""
    verdicts = {outcome.verdict for outcome in outcomes}
    return FAIL if FAIL in verdicts else INCONCLUSIVE if INCONCLUSIVE in verdicts or not verdicts else PASS


def exit_code(verdict: str) -> int:
    """PASS 0, FAIL 1, INCONCLUSIVE 5."""
    return {PASS: EXIT_OK, FAIL: EXIT_ERROR, INCONCLUSIVE: EXIT_INCONCLUSIVE}[verdict]


def prefetched_keys(log: str) -> tuple[int, int]:
    """Keys that a slice of the cache server's log says were served from L1 and from L2 (disk)."""
    matches = list(_PREFETCH.finditer(_COLOUR.sub("", log)))
    return sum(int(match["l1"]) for match in matches), sum(int(match["l2"]) for match in matches)


def metric_sum(exposition: str, name: str) -> int:
    """Sum of one counter over all its labels in Prometheus text format; 0 where it is absent.

    LMCache's counters appear with their first event, so an absent one has counted nothing.
    """
    total = 0.0
    for line in exposition.splitlines():
        match = _METRIC.match(line.strip())
        if match and match["name"] == name:
            total += float(match["value"])
    return int(total)


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the closing table of a result file."""
    rows = [
        ("namespace", str(result["namespace"])),
        ("prompt tokens", str(result["cold"]["prompt_tokens"])),
        ("cold TTFT", f"{result['cold']['ttft_s']:.2f} s"),
    ]
    for restart, outcome in zip(result["restarts"], result["outcomes"]):
        scenario = restart["scenario"]
        rows += [
            (f"{scenario}: restored TTFT", f"{restart['answer']['ttft_s']:.2f} s"),
            (f"{scenario}: cached tokens", str(restart["answer"]["cached_tokens"])),
            (f"{scenario}: tokens read from disk", str(restart["l2_tokens"])),
            (
                f"{scenario}: answer",
                "equals the cold one" if restart["answer"]["text"] == result["cold"]["text"] else "differs",
            ),
            (f"{scenario}: verdict", outcome["verdict"]),
        ]
    return [*rows, ("verdict", str(result["verdict"]))]


def _cold_failures(cold: Answer, store: Store, expected: str) -> list[str]:
    failures = []
    if cold.cached_tokens:
        failures.append(f"the first request was not cold: {cold.cached_tokens} tokens were already cached")
    if store.bytes_after <= store.bytes_before or store.chunks <= 0:
        failures.append(
            f"the first request stored nothing on disk: {store.bytes_before} bytes before, {store.bytes_after} after, "
            f"{store.chunks} chunks"
        )
    if expected and expected not in cold.text:
        failures.append(f"the cold answer does not contain {expected!r}: {cold.text[:80]!r}")
    return failures


def _reuse_failures(cold: Answer, restart: Restart) -> list[str]:
    failures = []
    answer = restart.answer
    if not restart.engine_replaced:
        failures.append("the engine was not restarted: the same process answers as before")
    if answer.cached_tokens == 0:
        failures.append("cached_tokens is 0 after the restart: nothing was reused")
    if answer.prompt_tokens != cold.prompt_tokens:
        failures.append(
            f"the prompt had {cold.prompt_tokens} tokens before and {answer.prompt_tokens} after the restart"
        )
    if answer.text != cold.text:
        failures.append(f"the answer changed: {cold.text[:80]!r} before, {answer.text[:80]!r} after")
    if answer.ttft_s >= cold.ttft_s:
        failures.append(f"restoring was not faster: {answer.ttft_s:.2f} s against {cold.ttft_s:.2f} s cold")
    if restart.bytes_after > restart.bytes_before:
        failures.append(
            f"the cache grew by {restart.bytes_after - restart.bytes_before} bytes: the prompt was stored again"
        )
    return failures


def _disk_failures(restart: Restart) -> list[str]:
    failures = []
    if not restart.cache_replaced:
        failures.append("the cache server was not restarted: the same process answers as before")
    if restart.l2_keys == 0:
        failures.append("the server's log shows no key read from disk after the restart")
    if restart.l2_tokens == 0:
        failures.append("the server's counters show no token read from disk after the restart")
    return failures
