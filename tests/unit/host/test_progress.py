"""host.progress: lines for logs."""

from __future__ import annotations

from kvpersist.host.progress import ProgressLines


class Log:
    """Lines, and the clock by which they are due."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.progress = ProgressLines(self.lines.append, every_s=10, clock=lambda: self.now)

    def after(self, seconds: float, done: float, total: float) -> list[str]:
        self.now += seconds
        self.lines.clear()
        self.progress(int(done), int(total))
        return self.lines


def test_a_line_tells_of_bytes_rate_and_time_left_every_ten_seconds() -> None:
    log = Log()
    assert log.after(0, 0, 492e9) == []
    assert log.after(9.9, 39e9, 492e9) == []
    assert log.after(0.1, 40e9, 492e9) == ["hashing: 40.0 of 492.0 GB, 4.00 GB/s, 0:01:53 left"]
    assert log.after(9.9, 79e9, 492e9) == []
    assert log.after(90.1, 220e9, 492e9) == ["hashing: 220.0 of 492.0 GB, 2.00 GB/s, 0:02:16 left"]


def test_work_that_ends_early_is_not_mentioned() -> None:
    log = Log()
    assert log.after(0, 0, 5) == []
    assert log.after(9, 5, 5) == []


def test_a_disk_that_gives_nothing_is_no_division_by_zero() -> None:
    log = Log()
    log.after(0, 0, 5e9)
    assert log.after(20, 0, 5e9) == []
    assert log.after(1, 1e9, 5e9) == ["hashing: 1.0 of 5.0 GB, 0.05 GB/s, 0:01:24 left"]
