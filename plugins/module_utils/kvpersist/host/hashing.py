"""SHA-256 of large files: in parallel, with progress, remembered between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Callable

from ..core.errors import UsageError
from .files import read_text, reason, write_atomic

_PIECE = 4 * 1024 * 1024

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread."""


class HashCache:
    """Remembers digests by path, size, modification and change time, and inode.

    A file whose content changed with size, times and inode unchanged is missed on purpose only where ``trust`` is
    given; an unreadable or damaged cache file is an empty one, since hashing again is always right.

    Args:
        path: the cache's file; None remembers nothing.
        trust: whether remembered digests may be used.
    """

    def __init__(self, path: str | None, trust: bool = True) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        self._changed = False
        self._lock = Lock()
        if path is not None and trust and os.path.exists(path):
            try:
                content = json.loads(read_text(path))
            except (UsageError, ValueError, RecursionError):
                content = {}
            if isinstance(content, dict):
                self._known = content

    def lookup(self, path: str, stat: os.stat_result) -> str | None:
        """The digest of a file that has not changed since it was hashed, else None."""
        entry = self._known.get(path)
        if isinstance(entry, dict) and entry.get("stamp") == _stamp(stat) and isinstance(entry.get("sha256"), str):
            return str(entry["sha256"])
        return None

    def remember(self, path: str, stat: os.stat_result, sha256: str) -> None:
        """Keeps a digest with the state of the file from before it was read."""
        with self._lock:
            self._known[path] = {"stamp": _stamp(stat), "sha256": sha256}
            self._changed = True

    def save(self) -> None:
        """Writes the cache's file if anything was added; a state folder that cannot be written costs time, not more."""
        if self._path is not None and self._changed:
            with contextlib.suppress(UsageError):  # what is not remembered is hashed again
                write_atomic(self._path, json.dumps(self._known, sort_keys=True, indent=1))
            self._changed = False


def sha256_files(paths: Sequence[str], cache: HashCache, progress: Progress | None = None) -> dict[str, str]:
    """SHA-256 of each file.

    Args:
        paths: the files; symbolic links are followed.
        cache: remembered digests; new ones are added, saving is the caller's.
        progress: told of bytes done, including those that the cache answered.

    Raises:
        UsageError: naming the file that cannot be read, or that changed while it was read.
    """
    resolved = {path: os.path.realpath(path) for path in paths}
    stats = {path: _stat(real) for path, real in resolved.items()}
    total = sum(stat.st_size for stat in stats.values())
    done = 0
    lock = Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    def digest(path: str) -> str:
        real, stat = resolved[path], stats[path]
        known = cache.lookup(real, stat)
        if known is not None:
            advance(stat.st_size)
            return known
        value = _sha256(real, advance)
        if _stamp(_stat(real)) != _stamp(stat):
            raise UsageError(f"hashing {path}", "it changed while it was read", "Wait until the copy is complete.")
        cache.remember(real, stat, value)
        return value

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return dict(zip(paths, pool.map(digest, paths)))


def _sha256(path: str, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while True:
                count = file.readinto(buffer)
                if not count:
                    return digest.hexdigest()
                digest.update(view[:count])
                advance(count)
    except OSError as error:
        raise UsageError(f"hashing {path}", reason(error), "Check the file and its permissions.") from None


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise UsageError(f"hashing {path}", reason(error), "Check the file and its permissions.") from None


def _stamp(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
