from __future__ import annotations

import json

import pytest
from kvpersist.core import writers
from kvpersist.core.writers import Found, Liveness, Marker

MARKER = Marker("a" * 32, 42, 1000, "pid:[4026531836]", "boot", "host")
FOREIGN = None  # the pid says nothing to this observer


@pytest.mark.parametrize(
    ("marker", "found", "age", "expected"),
    [
        (MARKER, Found.SAME, 0, Liveness.LIVE),
        (MARKER, Found.SAME, 1e6, Liveness.LIVE),  # a stuck heartbeat kills no process that is there
        (MARKER, Found.OTHER, 0, Liveness.DEAD),  # pid reuse, or a crash a second ago
        (MARKER, Found.UNKNOWN, 1e6, Liveness.UNDECIDABLE),
        (None, None, 1e6, Liveness.UNDECIDABLE),
        (MARKER, FOREIGN, 0, Liveness.LIVE),
        (MARKER, FOREIGN, 119, Liveness.LIVE),
        (MARKER, FOREIGN, 121, Liveness.DEAD),
        (MARKER, FOREIGN, -60, Liveness.LIVE),
        (MARKER, FOREIGN, -7200, Liveness.UNDECIDABLE),
    ],
)
def test_liveness(marker: Marker | None, found: Found | None, age: float, expected: Liveness) -> None:
    assert writers.liveness(marker, found, age) is expected


@pytest.mark.parametrize(
    ("writer", "age", "removed"),
    [
        (Liveness.LIVE, 1e9, False),
        (Liveness.UNDECIDABLE, 1e9, False),
        (Liveness.DEAD, 0, True),
        (None, 899, False),
        (None, 901, True),
        (None, -1e6, False),
    ],
)
def test_temporary_files(writer: Liveness | None, age: float, removed: bool) -> None:
    assert writers.may_remove_temporary(writer, age) is removed


def test_markers_of_the_dead_are_kept_for_an_hour() -> None:
    assert not writers.may_remove_marker(Liveness.DEAD, 3599)
    assert writers.may_remove_marker(Liveness.DEAD, 3601)
    assert not writers.may_remove_marker(Liveness.LIVE, 1e9)
    assert not writers.may_remove_marker(Liveness.UNDECIDABLE, 1e9)


def test_a_marker_reads_back() -> None:
    assert writers.parse_marker(MARKER.render()) == MARKER


@pytest.mark.parametrize(
    "change", [{"pid": "42"}, {"pid": 0}, {"pid": True}, {"writer": "../x"}, {"host": None}, {"more": 1}]
)
def test_a_marker_that_is_none_is_refused(change: dict[str, object]) -> None:
    assert writers.parse_marker(json.dumps({**json.loads(MARKER.render()), **change})) is None
    for text in ("", "{", "[]", "null"):
        assert writers.parse_marker(text) is None


def test_a_pid_means_something_only_in_its_namespace_and_boot() -> None:
    assert writers.is_observable(MARKER, MARKER)
    assert not writers.is_observable(MARKER, Marker("b" * 32, 1, 1, "pid:[1]", "boot", "host"))
    assert not writers.is_observable(MARKER, Marker("b" * 32, 1, 1, MARKER.pid_namespace, "later", "host"))
