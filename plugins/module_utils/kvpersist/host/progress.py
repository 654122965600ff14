"""Progress for logs, where a bar cannot be drawn again and again."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Callable


class ProgressLines:
    """Writes a line now and then: how much is hashed, how fast, how long it will still take.

    Work that ends before the first line is due is not mentioned.

    Args:
        write: takes one line without its end.
        every_s: seconds between two lines.
        clock: seconds that only grow.
    """

    def __init__(
        self, write: Callable[[str], object], every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._every_s = every_s
        self._clock = clock
        self._begun: float | None = None
        self._due = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Is told of (bytes done, bytes in all), first before any work."""
        now = self._clock()
        if self._begun is None:
            self._begun = now
            self._due = now + self._every_s
        elif now >= self._due and done:
            self._due = now + self._every_s
            rate = done / (now - self._begun)
            self._write(
                f"hashing: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, "
                f"{timedelta(seconds=round((total - done) / rate))} left"
            )
