"""Which objects there are, how many bytes they and everything else take, and which of them are in use.

All of it is in memory and under one lock. The hard cap holds because a store reserves its bytes before it writes any,
and bytes are given back only after the file is gone.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from kvpersist.core.frames import FrameKey

# Keys of one request are told apart in time by this much, so that their order survives in the files' times.
_STEP_NS = 1000


class Admission(enum.Enum):
    """What became of the wish to store an object."""

    GRANTED = "granted"
    PRESENT = "present"
    WRITING = "writing"
    LEAVING = "leaving"
    CAPACITY = "capacity"
    FREE_SPACE = "free_space"


class Entry:
    """One object on disk.

    Args:
        handle: the caller's name for it, told to whoever listens.
        size: bytes of its file.
        used_ns: time of its last use, nanoseconds since the epoch.
    """

    __slots__ = ("handle", "is_announced", "is_readable", "pins", "pins_until", "size", "used_ns")

    def __init__(self, handle: Any, size: int, used_ns: int) -> None:
        self.handle = handle
        self.size = size
        self.used_ns = used_ns
        self.pins = 0
        self.pins_until = 0.0
        self.is_readable = True
        # Whether listeners have been told of it, and so must be told when it goes.
        self.is_announced = False


class ScopeUsage:
    """Sums over the objects of one scope."""

    __slots__ = ("bytes", "files", "used_ns")

    def __init__(self) -> None:
        self.bytes = 0
        self.files = 0
        self.used_ns = 0


class Inventory:
    """The objects of one cache root.

    Args:
        capacity: hard cap in bytes.
        min_free: bytes of the filesystem to leave free.
        free_bytes: tells the filesystem's free bytes.
        monotonic: a clock that never goes back, in seconds.
    """

    def __init__(
        self, capacity: int, min_free: int, free_bytes: Callable[[], int], monotonic: Callable[[], float]
    ) -> None:
        self._capacity = capacity
        self._min_free = min_free
        self._free_bytes = free_bytes
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._entries: dict[FrameKey, Entry] = {}
        self._writing: dict[FrameKey, int] = {}
        self._leaving: set[FrameKey] = set()
        self._used_since_flush: dict[FrameKey, Entry] = {}
        self._pinned: dict[FrameKey, Entry] = {}
        self._scopes: dict[str, ScopeUsage] = {}
        self._object_bytes = 0
        self._reserved_bytes = 0
        self._other_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: FrameKey, handle: Any, size: int, used_ns: int) -> None:
        """Adds an object that is on disk already, of which every listener will be told when it comes."""
        entry = Entry(handle, size, used_ns)
        entry.is_announced = True
        with self._lock:
            self._insert(key, entry)

    def add_other_bytes(self, size: int) -> None:
        """Counts files that are no objects and take room under the cap; negative when they are gone."""
        with self._lock:
            self._other_bytes += size

    def usage(self) -> dict[str, int]:
        """Bytes of objects, reserved for stores that run, and of other files."""
        with self._lock:
            return {"objects": self._object_bytes, "reserved": self._reserved_bytes, "other": self._other_bytes}

    def used_bytes(self) -> int:
        """Everything that counts against the cap."""
        with self._lock:
            return self._object_bytes + self._reserved_bytes + self._other_bytes

    def scopes(self) -> dict[str, dict[str, int]]:
        """Bytes, files and last use of each scope."""
        with self._lock:
            return {
                scope: {"bytes": usage.bytes, "files": usage.files, "last_use_s": usage.used_ns // 10**9}
                for scope, usage in self._scopes.items()
            }

    def newest_first(self) -> list[Entry]:
        """All objects, the one used last first."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: -entry.used_ns)

    def entry(self, key: FrameKey) -> Entry | None:
        """The object of a key that can be read, None where there is none."""
        with self._lock:
            entry = self._entries.get(key)
            return entry if entry is not None and entry.is_readable else None

    def admit(self, key: FrameKey, size: int) -> Admission:
        """Reserves the bytes of a store. What is granted must end in :meth:`commit` or :meth:`abandon`.

        Args:
            key: the object.
            size: most bytes that its file will have.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.is_readable:
                return Admission.PRESENT
            if key in self._writing:
                return Admission.WRITING
            if key in self._leaving:
                return Admission.LEAVING
            if self._object_bytes + self._reserved_bytes + self._other_bytes + size > self._capacity:
                return Admission.CAPACITY
            # Bytes reserved by others may be written already; counting them twice errs on the safe side.
            if self._free_bytes() - self._reserved_bytes - size < self._min_free:
                return Admission.FREE_SPACE
            self._writing[key] = size
            self._reserved_bytes += size
            return Admission.GRANTED

    def commit(self, key: FrameKey, handle: Any, size: int, used_ns: int) -> tuple[Entry, Entry | None]:
        """Turns a reservation into an object.

        Returns:
            The object, and the unreadable one that it replaced.
        """
        with self._lock:
            self._reserved_bytes -= self._writing.pop(key)
            old = self._entries.pop(key, None)
            if old is not None:
                self._forget(key, old)
                self._object_bytes -= old.size
            entry = Entry(handle, size, used_ns)
            self._insert(key, entry)
            return entry, old

    def abandon(self, key: FrameKey) -> None:
        """Gives a reservation back, once the file is gone."""
        with self._lock:
            self._reserved_bytes -= self._writing.pop(key)

    def pin(self, keys: Sequence[FrameKey], now_ns: int, ttl_s: float) -> list[int]:
        """Finds objects, pins them and notes their use.

        Args:
            keys: of one request, the most important first.
            now_ns: time of the request, nanoseconds since the epoch.
            ttl_s: seconds after which the pins lapse.

        Returns:
            Positions in ``keys`` of those that are there.
        """
        now = self._monotonic()
        hits = []
        with self._lock:
            for position, key in enumerate(keys):
                entry = self._entries.get(key)
                if entry is None or not entry.is_readable:
                    continue
                entry.pins = entry.pins + 1 if entry.pins_until > now else 1
                entry.pins_until = now + ttl_s
                self._pinned[key] = entry
                entry.used_ns = now_ns - position * _STEP_NS
                self._used_since_flush[key] = entry
                self._scopes[key.scope].used_ns = now_ns
                hits.append(position)
        return hits

    def handles(self, keys: Sequence[FrameKey], positions: Iterable[int]) -> list[Any]:
        """Handles of the objects of those keys that are there."""
        with self._lock:
            found = (self._entries.get(keys[position]) for position in positions)
            return [entry.handle for entry in found if entry is not None]

    def unpin(self, keys: Iterable[FrameKey]) -> None:
        """Takes one pin off each object."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.pins:
                    entry.pins -= 1
                    if not entry.pins:
                        self._pinned.pop(key, None)

    def pinned(self) -> int:
        """How many objects are pinned now."""
        now = self._monotonic()
        with self._lock:
            self._pinned = {key: entry for key, entry in self._pinned.items() if entry.pins_until > now}
            return len(self._pinned)

    def mark_unreadable(self, key: FrameKey, entry: Entry) -> None:
        """Makes an object a miss that the next store replaces."""
        with self._lock:
            if self._entries.get(key) is entry:
                entry.is_readable = False

    def take(self, key: FrameKey, *, only: Entry | None = None) -> Entry | None:
        """Takes an object out. Its bytes count until :meth:`gone`, and it is not stored again until :meth:`settle`.

        Args:
            key: the object.
            only: take it, pinned or not, only if it still is this one. None takes it only if nobody uses it.

        Returns:
            None where it was not taken.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or key in self._writing:
                return None
            if only is not None:
                if entry is not only:
                    return None
            elif entry.pins and entry.pins_until > self._monotonic():
                return None
            del self._entries[key]
            self._forget(key, entry)
            self._leaving.add(key)
            return entry

    def gone(self, entry: Entry, *, set_aside: int = 0) -> None:
        """The file of an object that was taken out is gone.

        Args:
            entry: the object.
            set_aside: bytes of it that still count, as no object.
        """
        with self._lock:
            self._object_bytes -= entry.size
            self._other_bytes += set_aside

    def settle(self, keys: Iterable[FrameKey]) -> None:
        """Lets objects that were taken out be stored again. Listeners must know by now that they are gone, or what
        they are told would arrive in the wrong order."""
        with self._lock:
            self._leaving.difference_update(keys)

    def put_back(self, key: FrameKey, entry: Entry) -> None:
        """The file of an object that was taken out could not be removed."""
        with self._lock:
            self._leaving.discard(key)
            self._object_bytes -= entry.size
            self._insert(key, entry)

    def take_used(self) -> dict[FrameKey, Entry]:
        """Objects used since the last call."""
        with self._lock:
            used, self._used_since_flush = self._used_since_flush, {}
            return used

    def contains(self, key: FrameKey) -> bool:
        """Whether there is an object, readable or not."""
        with self._lock:
            return key in self._entries

    def holds(self, key: FrameKey, entry: Entry) -> bool:
        """Whether an object is the one of its key still."""
        with self._lock:
            return self._entries.get(key) is entry

    def _insert(self, key: FrameKey, entry: Entry) -> None:
        self._entries[key] = entry
        self._object_bytes += entry.size
        usage = self._scopes.get(key.scope)
        if usage is None:
            usage = self._scopes[key.scope] = ScopeUsage()
        usage.bytes += entry.size
        usage.files += 1
        usage.used_ns = max(usage.used_ns, entry.used_ns)

    def _forget(self, key: FrameKey, entry: Entry) -> None:
        self._used_since_flush.pop(key, None)
        self._pinned.pop(key, None)
        usage = self._scopes[key.scope]
        usage.bytes -= entry.size
        usage.files -= 1
        if not usage.files:
            del self._scopes[key.scope]
