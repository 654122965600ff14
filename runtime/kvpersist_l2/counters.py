"""What an adapter counts, and the bytes it wrote on each day."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

from kvpersist.core.layout import WRITTEN_FILE
from kvpersist.host.files import write_atomic

_DAYS_KEPT = 31


class Counters:
    """Counters since the start of the process.

    Args:
        root: the cache root, where the bytes written on each day outlive restarts.
    """

    def __init__(self, root: str) -> None:
        self._path = os.path.join(root, WRITTEN_FILE)
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()
        self._written = _read_days(self._path)
        self._is_saved = True

    def add(self, name: str, amount: int = 1) -> None:
        """Counts something."""
        with self._lock:
            self._values[name] += amount

    def add_written(self, size: int) -> None:
        """Counts bytes that went to the disk, whatever became of them."""
        day = time.strftime("%Y-%m-%d", time.gmtime())
        with self._lock:
            self._values["written_bytes"] += size
            self._written[day] = self._written.get(day, 0) + size
            self._is_saved = False

    def values(self) -> dict[str, int]:
        """All counters that are not zero."""
        with self._lock:
            return dict(self._values)

    def written_by_day(self) -> dict[str, int]:
        """Bytes written on each day (UTC), the newest last."""
        with self._lock:
            return dict(sorted(self._written.items())[-_DAYS_KEPT:])

    def save(self) -> None:
        """Writes the bytes of each day to the cache root, if they changed.

        Raises:
            UsageError: when the file cannot be written.
        """
        with self._lock:
            if self._is_saved:
                return
            self._is_saved = True
        write_atomic(self._path, json.dumps(self.written_by_day()) + "\n")


def _read_days(path: str) -> dict[str, int]:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {day: size for day, size in value.items() if type(size) is int}
