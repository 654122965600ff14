from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import pytest
from kvpersist.core.layout import READ_RATES_FILE
from kvpersist_l2.read_rates import ReadRates

SIZE = 8 << 20


class Disk:
    """Reads at a given rate for each way, by a clock that only reads move."""

    def __init__(self, root: Path, **bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.now = 0.0
        self.rates = ReadRates(str(root), lambda: self.now)

    def read(self, count: int, length: int = SIZE) -> list[str]:
        ways = []
        for _ in range(count):
            with self.rates.cold_read(length) as way:
                self.now += length / self.bytes_per_s[way]
            ways.append(way)
            self.now += 1  # idle time does not count
        return ways


@pytest.mark.parametrize(("direct", "buffered", "best"), [(2e9, 1e9, "direct"), (1e9, 2e9, "buffered")])
def test_both_ways_are_tried_then_the_faster_is_taken_and_the_slower_tried_now_and_then(
    direct: float, buffered: float, best: str, tmp_path: Path
) -> None:
    disk = Disk(tmp_path, direct=direct, buffered=buffered)
    ways = disk.read(16 * 100)
    assert ways[:32] == ["direct"] * 16 + ["buffered"] * 16
    assert 2 <= sum(way != best for way in ways[32:]) / 16 <= 4
    assert disk.rates.values()[str(2 * SIZE)] == pytest.approx({"direct": direct, "buffered": buffered}, rel=0.01)


def test_a_disk_that_changes_sides_is_followed(tmp_path: Path) -> None:
    disk = Disk(tmp_path, direct=2e9, buffered=1e9)
    disk.read(16 * 10)
    disk.bytes_per_s = {"direct": 0.5e9, "buffered": 1e9}
    disk.read(16 * 40)
    assert disk.read(16 * 4).count("buffered") >= 16 * 3


def test_sizes_are_judged_apart(tmp_path: Path) -> None:
    disk = Disk(tmp_path, direct=1e9, buffered=2e9)
    disk.read(48)
    disk.bytes_per_s = {"direct": 2e9, "buffered": 1e9}
    disk.read(3 * 128, 1 << 20)
    assert disk.read(1) == ["buffered"]
    assert disk.read(1, 1 << 20) == ["direct"]


def test_rates_outlive_a_restart(tmp_path: Path) -> None:
    disk = Disk(tmp_path, direct=1e9, buffered=2e9)
    disk.read(48)
    disk.rates.save()
    again = Disk(tmp_path, direct=1e9, buffered=2e9)
    assert again.rates.values() == disk.rates.values()
    assert again.read(1) == ["buffered"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": {}}', '{"16777216": {"direct": "fast"}}', '{"1": 3}', "\0"])
def test_rates_that_cannot_be_understood_are_learnt_anew(content: str, tmp_path: Path) -> None:
    (tmp_path / READ_RATES_FILE).write_text(content)
    assert Disk(tmp_path, direct=1e9, buffered=2e9).read(1) == ["direct"]


def test_reads_at_the_same_time_share_their_time_and_failed_ones_count_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path, direct=1e9, buffered=1e9)
    for _ in range(4):
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(disk.rates.cold_read(SIZE))
            disk.now += 0.1

    def fail() -> None:
        with disk.rates.cold_read(SIZE):
            disk.now += 0.1
            raise OSError("gone")

    for _ in range(16):
        with pytest.raises(OSError, match="gone"):
            fail()
    rates = disk.rates.values()[str(2 * SIZE)]
    assert rates["direct"] == pytest.approx(16 * SIZE / 0.4)
    assert rates["buffered"] == 0


def test_many_threads(tmp_path: Path) -> None:
    rates = ReadRates(str(tmp_path), iter(range(10**9)).__next__)

    def work() -> None:
        for _ in range(500):
            with rates.cold_read(SIZE):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rates.save()
    assert json.loads((tmp_path / READ_RATES_FILE).read_text()) == rates.values()
    assert set(rates.values()[str(2 * SIZE)]) == {"direct", "buffered"}
