"""SHA-256 of large files: on all cores, with progress, remembered between runs and through interruptions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import FileIO
from threading import Event, Lock
from typing import Callable

from ..core.errors import UsageError
from .files import reason, write_atomic

_PIECE = 1024 * 1024
# Bounds memory: two pieces each. More cores than that are faster than any disk.
_MOST_WORKERS = 16
# Smaller files are read too quickly for a second thread to be worth its start.
_LARGE = 64 * 1024 * 1024
_REPORT_EVERY_S = 0.2
# The coarsest steps in which file systems keep times: FAT 2 s, ext3 1 s. A second change within one leaves no trace.
_COARSEST_TIME_NS = 2_000_000_000
# 200 shards take 60 kB; what is larger than this is not of our making.
_LARGEST_CACHE = 64 * 1024 * 1024
_OUTDATED_LINES = 1000

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of what must be read, by the thread that asked for the digests."""

_Stamp = tuple[int, int, int, int]


class HashCache:
    """Remembers digests by path, size, modification and change time, and inode.

    Each digest is one line that is appended the moment it is known and carries its own checksum. So a killed process
    loses only the files it was at, several processes may write at once, and a damaged line is hashed again instead of
    believed. The last line for a path counts.

    Args:
        path: the cache's file; None remembers nothing.
        trust: whether remembered digests may be used.
        keep: whether new ones are written down. A file that cannot be written costs time, not more.
    """

    def __init__(self, path: str | None, trust: bool = True, keep: bool = False) -> None:
        self._path = path if keep else None
        self._lock = Lock()
        lines = _lines(path) if path is not None else []
        known = dict(entry for entry in map(_parse, lines) if entry is not None)
        if self._path is not None and len(lines) > 2 * len(known) + _OUTDATED_LINES:
            with contextlib.suppress(UsageError):
                write_atomic(self._path, "".join(_line(name, *entry) for name, entry in known.items()))
        self._known = known if trust else {}

    def lookup(self, path: str, stat: os.stat_result) -> str | None:
        """The digest of a file that has not changed since it was hashed, else None."""
        stamp, sha256 = self._known.get(path, (None, None))
        return sha256 if stamp == _stamp(stat) else None

    def remember(self, path: str, stat: os.stat_result, sha256: str, read_ns: int) -> None:
        """Keeps a digest, unless the file was so young that another change would have left the same times.

        Args:
            stat: the state of the file from before it was read.
            read_ns: when reading began, in ns since the epoch.
        """
        if read_ns - stat.st_ctime_ns < _COARSEST_TIME_NS:
            return
        with self._lock:
            self._known[path] = (_stamp(stat), sha256)
            if self._path is not None:
                with contextlib.suppress(OSError):
                    _append(self._path, _line(path, _stamp(stat), sha256))


def _lines(path: str) -> list[bytes]:
    try:
        if not os.path.isfile(path):
            return []  # a pipe would block for ever
        with open(path, "rb") as file:
            return file.read(_LARGEST_CACHE).split(b"\n")
    except OSError:
        return []


def _parse(line: bytes) -> tuple[str, tuple[_Stamp, str]] | None:
    try:
        check, path, stamp, sha256 = json.loads(line)
        whole = check == _check(path, stamp, sha256)
    except (ValueError, TypeError, RecursionError):
        return None
    return (path, (tuple(stamp), sha256)) if whole else None


def _line(path: str, stamp: _Stamp, sha256: str) -> str:
    # It begins with the end of the line before, which a kill may have torn.
    return "\n" + json.dumps([_check(path, stamp, sha256), path, stamp, sha256])


def _check(path: str, stamp: Iterable[int], sha256: str) -> str:
    size, mtime_ns, ctime_ns, inode = stamp
    content = f"{size:d} {mtime_ns:d} {ctime_ns:d} {inode:d} {sha256:64s} {path:s}"
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _append(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _File:
    """A file as it was found.

    Attributes:
        path: as the caller named it.
        key: its path without links, under which it is remembered.
    """

    path: str
    key: str
    stat: os.stat_result


def sha256_files(paths: Sequence[str], cache: HashCache, progress: Progress | None = None) -> dict[str, str]:
    """SHA-256 of each file.

    Args:
        paths: the files; symbolic links are followed.
        cache: remembered digests; each new one is added as soon as it is known.
        progress: told of the bytes that must be read; never called when the cache knows all.

    Raises:
        UsageError: naming the file that cannot be read, or that changed while it was read.
    """
    files = {path: _look(path) for path in paths}
    digests: dict[str, str] = {}
    unknown: dict[str, _File] = {}
    for file in files.values():
        known = cache.lookup(file.key, file.stat)
        if known is None:
            unknown[file.key] = file
        else:
            digests[file.key] = known
    if unknown:
        digests.update(_Hashing(list(unknown.values()), cache).run(progress))
    return {path: digests[file.key] for path, file in files.items()}


def _look(path: str) -> _File:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    key = os.path.realpath(path)
    # Below /proc/<pid>/root a path without links may lead to another file.
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(key), stat):
            return _File(path, key, stat)
    return _File(path, path, stat)


class _Hashing:
    """One run over files that the cache does not know."""

    def __init__(self, files: Sequence[_File], cache: HashCache) -> None:
        now = time.time_ns()
        # Young files last: until then they may be old enough to be remembered. Large ones first: no core idles long.
        self._files = sorted(
            files, key=lambda file: (now - file.stat.st_ctime_ns < _COARSEST_TIME_NS, -file.stat.st_size)
        )
        self._cache = cache
        self._total = sum(file.stat.st_size for file in files)
        self._workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        # With a core to spare, reading and hashing of one file overlap; without, the piece just read is best hashed at
        # once, while it is in the core's own cache.
        self._overlap = sum(file.stat.st_size >= _LARGE for file in files) < self._workers
        # What the engine reads next stays in memory, but a model that does not fit would only push out everything else.
        self._drop = self._total > _available_memory()
        self._done = 0
        self._lock = Lock()
        self._stop = Event()

    def run(self, progress: Progress | None) -> dict[str, str]:
        """Digests by key."""

        def report() -> None:
            if progress is not None:
                progress(self._done, self._total)

        with ThreadPoolExecutor(self._workers) as pool, ThreadPoolExecutor(self._workers) as self._readers:
            try:
                report()
                futures = {file.key: pool.submit(self._digest, file) for file in self._files}
                waiting = set(futures.values())
                while waiting:
                    finished, waiting = wait(waiting, _REPORT_EVERY_S, FIRST_EXCEPTION)
                    for future in finished:
                        future.result()
                    report()
            except BaseException:  # Ctrl-C too: what runs ends at its next piece, the rest does not begin
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return {key: future.result() for key, future in futures.items()}

    def _digest(self, file: _File) -> str:
        try:
            with open(file.path, "rb", buffering=0) as stream:
                began = time.time_ns()
                before = os.fstat(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                sha256 = self._sha256(stream)
            after = os.stat(file.path)
        except OSError as error:
            raise _unreadable(file.path, error) from None
        if not self._stop.is_set():
            if not _stamp(file.stat) == _stamp(before) == _stamp(after):
                raise UsageError(
                    f"hashing {file.path}",
                    "it changed while it was read",
                    "Wait until nothing writes to it, then run this again; finished files are remembered.",
                )
            self._cache.remember(file.key, before, sha256, began)
        return sha256

    def _sha256(self, stream: FileIO) -> str:
        digest = hashlib.sha256()
        piece, other = bytearray(_PIECE), bytearray(_PIECE)
        offset = 0
        count = stream.readinto(piece)
        while count and not self._stop.is_set():
            ahead = self._readers.submit(stream.readinto, other) if self._overlap and count == _PIECE else None
            digest.update(memoryview(piece)[:count])
            if self._drop:
                os.posix_fadvise(stream.fileno(), offset, count, os.POSIX_FADV_DONTNEED)
            offset += count
            with self._lock:
                self._done += count
            count = ahead.result() if ahead else stream.readinto(other)
            piece, other = other, piece
        return digest.hexdigest()


def _unreadable(path: str, error: OSError) -> UsageError:
    return UsageError(f"hashing {path}", reason(error), "Check the file and its permissions.")


def _available_memory() -> float:
    """Bytes that the page cache may take without swapping; infinite where the kernel does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("inf")


def _stamp(stat: os.stat_result) -> _Stamp:
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
