"""The writer guard on a host: markers of the writers of a cache root, and the lock that admits one server to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from ..core.layout import LOCK_FILE, WRITERS_FOLDER
from ..core.writers import (
    UNREGISTERED_S,
    Found,
    Liveness,
    Marker,
    is_observable,
    liveness,
    may_remove_marker,
    parse_marker,
)
from .files import reason, write_atomic
from .processes import process


def own_marker() -> Marker:
    """The marker of this process, with a new writer id.

    Raises:
        UsageError: where /proc does not show this process.
    """
    own = process(os.getpid())
    try:
        pid_namespace = os.readlink("/proc/self/ns/pid")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError("registering as a writer", reason(error), "Mount /proc.") from None
    if own is None:
        raise UsageError("registering as a writer", "/proc does not show this process", "Mount /proc.")
    return Marker(uuid.uuid4().hex, own.pid, own.start_ticks, pid_namespace, boot_id, socket.gethostname())


def look_for(marker: Marker) -> Found:
    """Looks for a writer's process in the own PID namespace."""
    found = process(marker.pid)
    if found is not None:
        return Found.SAME if found.start_ticks == marker.start_ticks else Found.OTHER
    try:
        os.kill(marker.pid, 0)
    except ProcessLookupError:
        return Found.OTHER
    except PermissionError:
        return Found.UNKNOWN  # it runs, but /proc is mounted with hidepid
    # Gone to /proc but not yet to its parent: a zombie writes nothing any more.
    return Found.OTHER


class Registration:
    """The marker file of this process in one cache root; the folder for markers is made where it is missing.

    Args:
        root: the cache root.

    Raises:
        UsageError: where /proc does not show this process.
    """

    def __init__(self, root: str) -> None:
        self.marker = own_marker()
        self._path = _marker_path(root, self.marker.writer)
        self._is_registered = False

    @property
    def writer(self) -> str:
        """Id of this writer."""
        return self.marker.writer

    def ensure(self) -> None:
        """Registers, if that has not been done. Call it before each temporary file.

        Raises:
            UsageError: when the marker cannot be written, e.g. on a full disk.
        """
        if not self._is_registered:
            write_atomic(self._path, self.marker.render())
            self._is_registered = True

    def heartbeat(self) -> None:
        """Shows that this writer is alive; writes the marker again where somebody removed it.

        Raises:
            UsageError: when the marker cannot be written.
        """
        if not self._is_registered:
            return
        try:
            os.utime(self._path)
        except FileNotFoundError:
            write_atomic(self._path, self.marker.render())

    def remove(self) -> None:
        """Removes the marker, once no temporary file of this writer is left."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class Observer:
    """Judges the writers of one cache root, each once.

    Args:
        root: the cache root.
        own: marker of the process that judges, which need not be registered.
        now: seconds since the epoch.
    """

    def __init__(self, root: str, own: Marker, now: float) -> None:
        self._root = root
        self._own = own
        self._now = now
        self._known: dict[str, Liveness | None] = {}

    def state(self, writer: str) -> Liveness | None:
        """Whether a writer runs; None where it is not registered. Ask after its temporary file was seen, never before:
        a writer registers first."""
        if writer not in self._known:
            self._known[writer] = self._judge(_marker_path(self._root, writer))[0]
        return self._known[writer]

    def remove_dead_markers(self) -> int:
        """Removes markers of writers that died long ago.

        Returns:
            How many were removed.
        """
        removed = 0
        folder = os.path.join(self._root, WRITERS_FOLDER)
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            state, age = self._judge(path)
            # A name with a dot in front is a marker that was being written, and no writer's yet.
            is_unfinished = name.startswith(".") and age > UNREGISTERED_S
            if state is not None and (is_unfinished or may_remove_marker(state, age)):
                os.unlink(path)
                removed += 1
        return removed

    def _judge(self, path: str) -> tuple[Liveness | None, float]:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                age = self._now - os.fstat(file.fileno()).st_mtime
                marker = parse_marker(file.read(65536))
        except FileNotFoundError:
            return None, 0.0
        except OSError:
            return Liveness.UNDECIDABLE, 0.0
        found = look_for(marker) if marker is not None and is_observable(marker, self._own) else None
        return liveness(marker, found, age), age


class RootLock:
    """Admits one server to a cache root, for as long as this object is not released.

    Args:
        root: the cache root.
        owner: marker of this process, told to whoever is refused.

    Raises:
        UsageError: naming the holder, when another server uses the root, or why the lock file cannot be used.
    """

    def __init__(self, root: str, owner: Marker) -> None:
        path = os.path.join(root, LOCK_FILE)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(f"locking {root}", reason(error), "Check the folder and its permissions.") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(path) if isinstance(error, BlockingIOError) else reason(error)
            os.close(self._descriptor)
            raise UsageError(
                f"locking {root}", holder, "Stop that server, or give this one a cache root of its own."
            ) from None
        content = {"pid": owner.pid, "host": owner.host, "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with contextlib.suppress(OSError):  # a full disk costs whoever is refused the name, not us the lock
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(content).encode() + b"\n", 0)

    def release(self) -> None:
        """Lets the next server in. The file stays, since removing it would let two servers lock two files."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(root: str) -> bool:
    """Whether a server uses a cache root now."""
    try:
        descriptor = os.open(os.path.join(root, LOCK_FILE), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _marker_path(root: str, writer: str) -> str:
    return os.path.join(root, WRITERS_FOLDER, f"{writer}.json")


def _holder(path: str) -> str:
    try:
        value: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        return f"it is used by process {value['pid']} on {value['host']} since {value['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it is used by another process"
