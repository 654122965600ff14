from __future__ import annotations

from typing import Any

import pytest
from kvpersist.core.errors import UsageError
from kvpersist_l2.params import parse_params

LEAST: dict[str, Any] = {"root": "/var/cache/kv", "capacity_bytes": 1_000_000}


def test_the_least_that_must_be_said() -> None:
    params = parse_params(LEAST)
    assert (params.codec, params.fsync, params.io, params.admission) == ("none", "none", "auto", "always")
    assert 8 <= params.thread_count() <= 16
    assert params.quarantine_limit() == 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"root": "relative"}, "absolute path"),
        ({"root": "/"}, "folder of its own"),
        ({"root": 3}, "Give a text"),
        ({"capacity_bytes": 0}, "disk budget"),
        ({"capacity_bytes": -1}, "from 0 up"),
        ({"capacity_bytes": 1.5}, "whole number"),
        ({"capacity_bytes": True}, "whole number"),
        ({"codec": "gzip"}, "none, zstd, lz4"),
        ({"io": "mmap"}, "auto, buffered, direct"),
        ({"fsync": "yes"}, "none, data, full"),
        ({"admission": "never"}, "second-hit"),
        ({"capacity_gb": 1}, "no such parameter"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_params({**LEAST, **change})


@pytest.mark.parametrize("name", ["root", "capacity_bytes"])
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is missing"):
        parse_params({other: value for other, value in LEAST.items() if other != name})
