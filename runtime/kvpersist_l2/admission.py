"""Which objects are worth writing: a memory of what was offered before, small enough to keep.

Two Bloom filters, one for each half of the window. A false answer only writes an object at its first offer.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from kvpersist.core.frames import FrameKey, whole_pages
from kvpersist.core.layout import ADMISSION_FILE, object_path

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"KVPA"
_BYTES = 512 * 1024
_PROBES = 4
# A sketch of a megabyte written at each heartbeat would wear the disk that it is meant to save.
SAVE_S = 600.0


class SecondHit:
    """Admits an object when it is offered the second time within a window.

    Args:
        root: the cache root, where the sketch outlives restarts.
        window_s: length of the window in seconds.
        now_s: seconds since the epoch.
    """

    def __init__(self, root: str, window_s: int, now_s: float) -> None:
        self._path = os.path.join(root, ADMISSION_FILE)
        self._half_s = max(1, window_s // 2)
        self._lock = threading.Lock()
        self._period = self._current_period(now_s)
        self._now, self._before = bytearray(_BYTES), bytearray(_BYTES)
        self._saved_s = now_s
        self._is_saved = True
        self._load()

    @property
    def most_bytes(self) -> int:
        """Most bytes that it takes on the disk: while it is written, there are two of it."""
        return 2 * whole_pages(_HEAD.size + 2 * _BYTES)

    def admits(self, key: FrameKey, now_s: float) -> bool:
        """Whether an object was offered before; notes that it is offered now."""
        with self._lock:
            self._turn(now_s)
            probes = list(_probes(key))
            if all(self._now[at] & bit for at, bit in probes):
                return True
            seen = all(self._before[at] & bit for at, bit in probes)
            for at, bit in probes:
                self._now[at] |= bit
            self._is_saved = False
            return seen

    def save(self, now_s: float, *, is_last: bool = False) -> None:
        """Writes the sketch to the cache root, if it changed and was not written lately.

        Raises:
            OSError: when it cannot be written.
        """
        with self._lock:
            if self._is_saved or not (is_last or abs(now_s - self._saved_s) >= SAVE_S):
                return
            content = _HEAD.pack(_MAGIC, self._half_s, self._period) + self._now + self._before
            self._saved_s, self._is_saved = now_s, True
        temporary = os.path.join(os.path.dirname(self._path), f".{ADMISSION_FILE}.new")
        Path(temporary).write_bytes(content)
        os.chmod(temporary, 0o600)
        os.replace(temporary, self._path)

    def _load(self) -> None:
        try:
            content = Path(self._path).read_bytes()
        except OSError:
            return
        if len(content) != _HEAD.size + 2 * _BYTES:
            return
        magic, half_s, period = _HEAD.unpack_from(content)
        if magic != _MAGIC or half_s != self._half_s:
            return  # of another window: what it remembers means something else
        first, second = content[_HEAD.size : _HEAD.size + _BYTES], content[_HEAD.size + _BYTES :]
        if period == self._period:
            self._now, self._before = bytearray(first), bytearray(second)
        elif period == self._period - 1:
            self._before = bytearray(first)

    def _current_period(self, now_s: float) -> int:
        return max(0, int(now_s // self._half_s))

    def _turn(self, now_s: float) -> None:
        period = self._current_period(now_s)
        if period == self._period:
            return
        self._before = self._now if period == self._period + 1 else bytearray(_BYTES)
        self._now = bytearray(_BYTES)
        self._period = period


def _probes(key: FrameKey) -> Iterator[tuple[int, int]]:
    digest = hashlib.blake2b(object_path(key).encode(), digest_size=4 * _PROBES).digest()
    for (number,) in struct.iter_unpack("<I", digest):
        position = number % (_BYTES * 8)
        yield position // 8, 1 << position % 8
