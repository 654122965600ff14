"""The restart test's verdict: each reason against PASS alone, and the readers of log and counters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core.errors import EXIT_ERROR, EXIT_INCONCLUSIVE, EXIT_OK
from kvpersist.core.recovery import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    Answer,
    Outcome,
    Restart,
    Store,
    exit_code,
    judge,
    metric_sum,
    overall,
    prefetched_keys,
    summary_rows,
)

COLD = Answer("The capital of France is Paris.", 23.6, 2250, 0)
STORE = Store(bytes_before=1000, bytes_after=5000, chunks=8)
WARM = Answer(COLD.text, 3.7, 2250, 2048)
BOTH = Restart(
    scenario="B",
    answer=WARM,
    engine_replaced=True,
    cache_replaced=True,
    bytes_before=5000,
    bytes_after=5000,
    l1_keys=0,
    l2_keys=8,
    l2_tokens=2048,
    device_bytes=4096,
    process_bytes=4096,
)
# The cache server goes on: its memory answers, so the disk has nothing to prove.
ENGINE = dataclasses.replace(
    BOTH, scenario="A", cache_replaced=False, l1_keys=8, l2_keys=0, l2_tokens=0, device_bytes=0, process_bytes=0
)


def verdict_of(
    restart: Restart = BOTH,
    cold: Answer = COLD,
    store: Store = STORE,
    expected: str = "Paris",
    device_required: bool = True,
) -> Outcome:
    return judge(cold, store, restart, expected, device_required)


def answered(restart: Restart, **changes: Any) -> Restart:
    return dataclasses.replace(restart, answer=dataclasses.replace(restart.answer, **changes))


@pytest.mark.parametrize("restart", [ENGINE, BOTH], ids=["A", "B"])
@pytest.mark.parametrize("expected", ["Paris", ""])
def test_with_all_the_evidence_it_passes(restart: Restart, expected: str) -> None:
    assert verdict_of(restart, expected=expected) == Outcome(restart.scenario, PASS, (), ())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cold": dataclasses.replace(COLD, cached_tokens=256)}, "the first request was not cold: 256 tokens"),
        ({"store": Store(5000, 5000, 8)}, "the first request stored nothing on disk: 5000 bytes before, 5000 after"),
        ({"store": Store(5000, 4000, 8)}, "the first request stored nothing on disk"),
        ({"store": Store(1000, 5000, 0)}, "the first request stored nothing on disk: 1000 bytes before, 5000 after, 0"),
        ({"expected": "Berlin"}, "the cold answer does not contain 'Berlin': 'The capital of France is Paris.'"),
    ],
)
@pytest.mark.parametrize("restart", [ENGINE, BOTH], ids=["A", "B"])
def test_a_flaw_before_the_restart_fails_alone(restart: Restart, changes: dict[str, Any], reason: str) -> None:
    outcome = verdict_of(restart, **changes)
    assert outcome.verdict == FAIL
    assert len(outcome.failures) == 1
    assert outcome.failures[0].startswith(reason)
    assert outcome.missing == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_replaced": False}, "the engine was not restarted: the same process answers as before"),
        ({"cached_tokens": 0}, "cached_tokens is 0 after the restart: nothing was reused"),
        ({"prompt_tokens": 2251}, "the prompt had 2250 tokens before and 2251 after the restart"),
        (
            {"text": "The capital of France is Paris!"},
            "the answer changed: 'The capital of France is Paris.' before, 'The capital of France is Paris!' after",
        ),
        ({"text": ""}, "the answer changed"),
        ({"ttft_s": 23.6}, "restoring was not faster: 23.60 s against 23.60 s cold"),
        ({"ttft_s": 30.0}, "restoring was not faster: 30.00 s against 23.60 s cold"),
        ({"bytes_after": 5001}, "the cache grew by 1 bytes: the prompt was stored again"),
    ],
)
@pytest.mark.parametrize("restart", [ENGINE, BOTH], ids=["A", "B"])
def test_a_flaw_after_the_restart_fails_alone(restart: Restart, changes: dict[str, Any], reason: str) -> None:
    of_answer = {name: value for name, value in changes.items() if hasattr(WARM, name)}
    of_restart = {name: value for name, value in changes.items() if name not in of_answer}
    outcome = verdict_of(dataclasses.replace(answered(restart, **of_answer), **of_restart))
    assert outcome.verdict == FAIL
    assert len(outcome.failures) == 1
    assert outcome.failures[0].startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache_replaced": False}, "the cache server was not restarted: the same process answers as before"),
        ({"l2_keys": 0}, "the server's log shows no key read from disk after the restart"),
        ({"l2_tokens": 0}, "the server's counters show no token read from disk after the restart"),
    ],
)
def test_scenario_b_needs_proof_of_the_disk_and_a_does_not(changes: dict[str, Any], reason: str) -> None:
    outcome = verdict_of(dataclasses.replace(BOTH, **changes))
    assert (outcome.verdict, outcome.failures) == (FAIL, (reason,))
    assert verdict_of(dataclasses.replace(ENGINE, **changes)).verdict == PASS


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"restart": answered(BOTH, cached_tokens=None)}, "the engine reports no cached_tokens"),
        ({"cold": dataclasses.replace(COLD, cached_tokens=None)}, "the engine reports no cached_tokens"),
        ({"restart": dataclasses.replace(BOTH, device_bytes=None)}, "the counters of the block device"),
        ({"restart": dataclasses.replace(BOTH, device_bytes=0)}, "the block device (kvp_cache_device) read nothing"),
    ],
)
def test_missing_evidence_is_inconclusive_alone(changes: dict[str, Any], missing: str) -> None:
    outcome = verdict_of(**changes)
    assert (outcome.verdict, outcome.failures) == (INCONCLUSIVE, ())
    assert len(outcome.missing) == 1
    assert outcome.missing[0].startswith(missing)


@pytest.mark.parametrize("device_bytes", [None, 0])
def test_a_device_that_nobody_named_need_not_speak(device_bytes: int | None) -> None:
    assert verdict_of(dataclasses.replace(BOTH, device_bytes=device_bytes), device_required=False).verdict == PASS


def test_a_device_is_asked_only_where_the_disk_is_read() -> None:
    assert verdict_of(dataclasses.replace(ENGINE, device_bytes=None), device_required=True).verdict == PASS


def test_a_failure_outranks_missing_evidence_and_both_are_reported() -> None:
    outcome = verdict_of(dataclasses.replace(BOTH, device_bytes=None, l2_keys=0))
    assert outcome.verdict == FAIL
    assert len(outcome.failures) == len(outcome.missing) == 1
    assert outcome.as_dict() == {
        "scenario": "B",
        "verdict": "FAIL",
        "failures": outcome.failures,
        "missing": outcome.missing,
    }


def test_speed_alone_never_passes() -> None:
    fast = answered(BOTH, ttft_s=0.001, cached_tokens=0)
    assert verdict_of(dataclasses.replace(fast, l2_keys=0, l2_tokens=0)).verdict == FAIL


def test_a_cache_that_shrank_is_no_failure() -> None:
    assert verdict_of(dataclasses.replace(BOTH, bytes_after=4000)).verdict == PASS


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        ([PASS], PASS),
        ([PASS, PASS], PASS),
        ([PASS, INCONCLUSIVE], INCONCLUSIVE),
        ([INCONCLUSIVE, FAIL], FAIL),
        ([FAIL, PASS], FAIL),
        ([], INCONCLUSIVE),
    ],
)
def test_the_worst_scenario_decides(verdicts: list[str], worst: str) -> None:
    assert overall([Outcome("A", verdict, (), ()) for verdict in verdicts]) == worst


@pytest.mark.parametrize(("verdict", "code"), [(PASS, EXIT_OK), (FAIL, EXIT_ERROR), (INCONCLUSIVE, EXIT_INCONCLUSIVE)])
def test_exit_codes(verdict: str, code: int) -> None:
    assert exit_code(verdict) == code


LINE = "Prefetch request completed (L1+L2): 12/12 retained keys (0 L1, 12 L2)"
ANSI = f"\x1b[32;20m[2026-11-30 10:00:00,123] LMCache INFO:\x1b[0m {LINE} \x1b[3m(storage_manager.py:100)\x1b[0m"


@pytest.mark.parametrize(
    ("log", "keys"),
    [
        ("", (0, 0)),
        (LINE, (0, 12)),
        (f"[2026-11-30] LMCache INFO: {LINE} in 25 ms\n", (0, 12)),
        (ANSI, (0, 12)),
        (f"\x1b[32m{LINE}\x1b[0m", (0, 12)),
        (f"\x1b[32mPrefetch request \x1b[1mcompleted\x1b[0m{LINE[len('Prefetch request completed') :]}", (0, 12)),
        (f"{LINE}\r\n{LINE}\r\n", (0, 24)),
        ("Prefetch request completed (L1+L2): 10/12 retained keys (4 L1, 6 L2)\n" + LINE, (4, 18)),
        ("Prefetch request completed (L1+L2): 0/12 retained keys (0 L1, 0 L2)", (0, 0)),
        ("Prefetch request completed (L1): 12/12 retained keys (12 L1)", (0, 0)),
        ("Retrieved 3072 tokens from L1", (0, 0)),
        ("Prefetch request completed (L1+L2): x/12 retained keys (0 L1, 12 L2)", (0, 0)),
        (LINE[:-10], (0, 0)),
    ],
)
def test_keys_are_counted_from_the_server_s_log(log: str, keys: tuple[int, int]) -> None:
    assert prefetched_keys(log) == keys


NAME = "lmcache_mp_lookup_hit_l2_tokens_total"
EXPOSITION = f"""\
# HELP {NAME} Tokens found in L2.
# TYPE {NAME} counter
{NAME}{{model="a",rank="0"}} 1024.0
{NAME}{{model="b",rank="1"}} 2.048e+03
{NAME}_created{{model="a"}} 1.7e+09
x_{NAME} 7
{NAME}x 7
other_total 5 1700000000000
"""


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (EXPOSITION, NAME, 3072),
        (EXPOSITION, "other_total", 5),
        (EXPOSITION, "absent_total", 0),
        ("", NAME, 0),
        (f"{NAME} 3", NAME, 3),
        (f"  {NAME} 3  \r\n", NAME, 3),
        (f'{NAME} NaN\n{NAME}{{a="b"}} 2', NAME, 2),
        (f'{NAME} +Inf\n{NAME}{{a="b"}} 2', NAME, 2),
        (f'{NAME}{{model="/models/a}}b",path="c d"}} 4', NAME, 4),
        (f'{NAME}{{model="a \\" b"}} 4', NAME, 4),
        (f"{NAME}{{}} 4", NAME, 4),
        (f"{NAME}", NAME, 0),
        (f"{NAME} 1.2.3", NAME, 0),
        (f"{NAME} e", NAME, 0),
    ],
)
def test_a_counter_is_summed_over_its_labels(text: str, name: str, value: int) -> None:
    assert metric_sum(text, name) == value


@given(st.lists(st.integers(0, 2**40)), st.text('abc{}" =,.'))
def test_any_labels_and_any_counts_are_summed(counts: list[int], label: str) -> None:
    escaped = label.replace("\\", "\\\\").replace('"', '\\"')
    text = "\n".join(f'{NAME}{{l="{escaped}",n="{number}"}} {count}' for number, count in enumerate(counts))
    assert metric_sum(text, NAME) == sum(counts)


def test_the_closing_table() -> None:
    restarts = [ENGINE, answered(BOTH, text="other", ttft_s=1.234)]
    rows = summary_rows(
        {
            "namespace": "kvp-1",
            "verdict": "FAIL",
            "cold": dataclasses.asdict(COLD),
            "restarts": [dataclasses.asdict(restart) for restart in restarts],
            "outcomes": [{"verdict": "PASS"}, {"verdict": "FAIL"}],
        }
    )
    assert rows == [
        ("namespace", "kvp-1"),
        ("prompt tokens", "2250"),
        ("cold TTFT", "23.60 s"),
        ("A: restored TTFT", "3.70 s"),
        ("A: cached tokens", "2048"),
        ("A: tokens read from disk", "0"),
        ("A: answer", "equals the cold one"),
        ("A: verdict", "PASS"),
        ("B: restored TTFT", "1.23 s"),
        ("B: cached tokens", "2048"),
        ("B: tokens read from disk", "2048"),
        ("B: answer", "differs"),
        ("B: verdict", "FAIL"),
        ("verdict", "FAIL"),
    ]
