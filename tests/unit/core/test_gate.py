"""The gate's verdict: precedence, completeness, and what a person reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core.errors import EXIT_INCONCLUSIVE, EXIT_MISMATCH, EXIT_OK
from kvpersist.core.gate import INCONCLUSIVE, MISMATCH, VERIFIED, Difference, Unreadable, compare
from kvpersist.core.identity import FIELDS, Identity

Make = Callable[..., Identity]
GONE = Unreadable("the process is gone", "Start the engine")
LINKS: dict[str, tuple[Any, Any]] = {"cache_port": (5555, 5555), "model_path": ("/models/a", "/models/a")}


def test_everything_equal_is_verified(identity: Make) -> None:
    verdict = compare(identity(), identity().as_dict(), LINKS)
    assert verdict.verdict == VERIFIED
    assert verdict.exit_code == EXIT_OK
    assert verdict.checked == (*FIELDS, "cache_port", "model_path")
    assert verdict.differences == ()
    assert verdict.unreadable == {}
    assert verdict.lines() == [f"Verified: {len(FIELDS) + 2} facts agree."]


@pytest.mark.parametrize("name", FIELDS)
def test_a_difference_in_any_field_is_a_mismatch_with_both_values(name: str, identity: Make) -> None:
    observed = {**identity().as_dict(), name: "something else"}
    verdict = compare(identity(), observed, LINKS)
    assert (verdict.verdict, verdict.exit_code) == (MISMATCH, EXIT_MISMATCH)
    expected = getattr(identity(), name)
    assert verdict.differences == (Difference(name, expected, "something else"),)
    assert name not in verdict.checked
    assert verdict.lines()[0] == f"MISMATCH {name}: identity {expected!r}, running 'something else'"
    assert "must not be reused" in verdict.lines()[-1]


@pytest.mark.parametrize("name", FIELDS)
def test_any_field_that_cannot_be_read_is_inconclusive_with_cause_and_fix(name: str, identity: Make) -> None:
    verdict = compare(identity(), {**identity().as_dict(), name: GONE}, LINKS)
    assert (verdict.verdict, verdict.exit_code) == (INCONCLUSIVE, EXIT_INCONCLUSIVE)
    assert verdict.unreadable == {name: GONE}
    assert name not in verdict.checked
    assert verdict.lines() == [f"INCONCLUSIVE {name}: the process is gone. Start the engine"]


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_nobody_looked_at_is_never_verified(name: str, identity: Make) -> None:
    observed = identity().as_dict()
    del observed[name]
    verdict = compare(identity(), observed, LINKS)
    assert verdict.verdict == INCONCLUSIVE
    assert list(verdict.unreadable) == [name]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ({"cache_port": (5555, 5556)}, MISMATCH),
        ({"cache_port": (5555, None)}, MISMATCH),
        ({"cache_port": (5555, "5555")}, MISMATCH),
        ({"cache_port": (5555, GONE)}, INCONCLUSIVE),
        ({"cache_port": (5555, GONE), "model_path": ("a", "b")}, MISMATCH),
        ({"cache_port": (5555, 5555)}, VERIFIED),
        ({}, VERIFIED),
    ],
)
def test_links_count_like_fields(links: dict[str, tuple[Any, Any]], expected: str, identity: Make) -> None:
    assert compare(identity(), identity().as_dict(), links).verdict == expected


STATES = st.dictionaries(st.sampled_from(list(FIELDS)), st.sampled_from(["differs", "unreadable"]))


@given(STATES)
def test_a_mismatch_outranks_what_could_not_be_read_and_nothing_is_lost(states: dict[str, str]) -> None:
    identity = ONE
    observed = dict(identity.as_dict())
    for name, state in states.items():
        observed[name] = GONE if state == "unreadable" else object()
    verdict = compare(identity, observed, {})
    kinds = set(states.values())
    expected = MISMATCH if "differs" in kinds else INCONCLUSIVE if kinds else VERIFIED
    assert verdict.verdict == expected
    assert {d.name for d in verdict.differences} == {name for name, state in states.items() if state == "differs"}
    assert set(verdict.unreadable) == {name for name, state in states.items() if state == "unreadable"}
    assert {*verdict.checked, *states} == set(FIELDS)
    assert len(verdict.checked) + len(states) == len(FIELDS)


ONE = Identity(
    **{
        name: {"int": 1, "bool": False, "hex40": "a" * 40, "hex64": "a" * 64, "kv_dtype": "fp8"}.get(field.kind, "x")
        for name, field in FIELDS.items()
    }
)


def test_the_result_has_plain_values_only(identity: Make) -> None:
    observed = {**identity().as_dict(), "kv_cache_dtype": "fp8", "device": GONE}
    assert compare(identity(), observed, LINKS).as_dict() == {
        "verdict": "mismatch",
        "differences": [{"name": "kv_cache_dtype", "identity": "bfloat16", "running": "fp8"}],
        "unreadable": {"device": {"cause": "the process is gone", "fix": "Start the engine"}},
        "checked": [name for name in [*FIELDS, *LINKS] if name not in ("kv_cache_dtype", "device")],
    }


def test_an_identity_edited_to_another_dtype_no_longer_matches_what_runs(identity: Make) -> None:
    edited = dataclasses.replace(identity(), kv_cache_dtype="fp8")
    verdict = compare(edited, identity().as_dict(), LINKS)
    assert verdict.lines()[0] == "MISMATCH kv_cache_dtype: identity 'fp8', running 'bfloat16'"
    assert verdict.exit_code == 4
