"""The disk tier of one cache root: stores, loads, removes, heals. Knows nothing of LMCache.

Every method but :meth:`Tier.close` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable

from kvpersist.core import frames, layout
from kvpersist.core.errors import KvpError, UsageError
from kvpersist.core.frames import FrameError, FrameKey, whole_pages
from kvpersist.core.writers import may_remove_temporary
from kvpersist.host.cache_scan import CacheContent, OtherFile, path_size, scan
from kvpersist.host.files import reason, write_atomic
from kvpersist.host.writers import Observer, Registration, RootLock, own_marker

from .admission import SecondHit
from .checksum import fastest_crc32
from .codecs import Codec, CodecUnavailableError, chosen_codec, make_codec, worst_stored_length
from .counters import Counters
from .frame_io import ExpiredError, FrameFile, Io, Memory, NotAFileError, Scratch, read_frame, write_frame
from .inventory import Admission, Entry, Inventory
from .params import Params
from .read_rates import ReadRates

# Errors that say nothing about the file: another attempt may succeed.
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR, errno.EAGAIN}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_OPEN_ATTEMPTS = 5


@dataclass(frozen=True)
class Stored:
    """What became of a store.

    Args:
        is_success: whether the object is on disk, or deliberately is not.
        written: bytes of the new file, 0 where none was written.
        entry: the new object.
        replaced: the unreadable object that it replaced.
    """

    is_success: bool
    written: int = 0
    entry: Entry | None = None
    replaced: Entry | None = None


_NOBODY = contextlib.nullcontext()


class Tier:
    """Objects below one cache root, for as long as this process holds its lock.

    Args:
        params: the adapter's parameters.
        make_handle: gives the caller's name for an object found on disk, from its key and the model name that was
            last used for it.
        on_removed: called with each object that a failed load took out, before it can be stored again.
        warn: called with one line about what an operator should know.
        reading, writing: entered while a load or a store waits for the disk.

    Raises:
        UsageError: when the root cannot be used, is used by another server, or the codec's package is missing.
    """

    def __init__(
        self,
        params: Params,
        make_handle: Callable[[FrameKey, str], Any],
        on_removed: Callable[[Entry], None],
        warn: Callable[[str], None],
        reading: AbstractContextManager[None] = _NOBODY,
        writing: AbstractContextManager[None] = _NOBODY,
    ) -> None:
        self.params = params
        self._on_removed = on_removed
        self._warn = warn
        self._reading, self._writing = reading, writing
        self._codec = chosen_codec(params.codec)
        self._codecs: dict[int, Codec] = {} if self._codec is None else {self._codec.number: self._codec}
        self._quarantine: deque[OtherFile] = deque()
        self._quarantine_lock = threading.Lock()
        self._model_names: dict[str, str] = {}
        self._folders: set[str] = set()
        self._unknown: list[OtherFile] = []
        self._temporary: dict[str, int] = {}
        _prepare_root(params.root)
        self._lock = RootLock(params.root, own_marker())
        try:
            self._registration = Registration(params.root)
            self.counters = Counters(params.root)
            self._read_rates = ReadRates(params.root, time.monotonic)
            self._io = Io(params.io, fastest_crc32(), Scratch(), self._read_rates)
            self.inventory = Inventory(
                params.capacity_bytes, params.min_free_bytes, lambda: _free_bytes(params.root), time.monotonic
            )
            self._admission = (
                SecondHit(params.root, params.admission_window_s, time.time())
                if params.admission == "second-hit"
                else None
            )
            started = time.monotonic()
            self._take_over(scan(params.root), make_handle)
            if self._admission is not None:
                self.inventory.add_other_bytes(self._admission.most_bytes)
            self.scan_s = time.monotonic() - started
        except BaseException:
            self._lock.release()
            raise

    def store(
        self, key: FrameKey, handle: Any, model_name: str, memory: Memory, used_ns: int, deadline: float
    ) -> Stored:
        """Writes an object, unless it is there already.

        Args:
            key: the object's key.
            handle: the caller's name for it.
            model_name: the model name that it was stored under.
            memory: the object.
            used_ns: time of use to record, nanoseconds since the epoch.
            deadline: ``time.monotonic()`` after which the memory may hold another object.
        """
        refusal = self._refusal(key, memory)
        if refusal is not None:
            return refusal
        path = os.path.join(self.params.root, layout.object_path(key))
        temporary = layout.temporary_path(path, self._registration.writer)
        try:
            size = self._write(key, path, temporary, model_name, memory, used_ns, deadline)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
                _remove_if_empty(os.path.dirname(path))
            self.inventory.abandon(key)
            if not isinstance(error, (OSError, ExpiredError, KvpError)):
                raise
            self._count_failed_store(error)
            return Stored(False)
        entry, replaced = self.inventory.commit(key, handle, size, used_ns)
        self.counters.add("stored_objects")
        self.counters.add("stored_raw_bytes", len(memory.data))
        self.counters.add("stored_bytes", size)
        return Stored(True, size, entry, replaced)

    def lookup(self, keys: Sequence[FrameKey]) -> list[int]:
        """Positions of the keys whose objects are there; pins these, and records their use."""
        hits = self.inventory.pin(keys, time.time_ns(), self.params.pin_ttl_s)
        self.counters.add("looked_up", len(keys))
        self.counters.add("lookup_hits", len(hits))
        return hits

    def load(self, key: FrameKey, memory: Memory, deadline: float) -> bool:
        """Reads an object into LMCache's memory.

        Args:
            key: the object's key.
            memory: where it belongs; its content is undefined where this returns False.
            deadline: ``time.monotonic()`` after which the memory may belong to another object.

        Returns:
            Whether the memory now is the object, every byte verified.
        """
        entry = self.inventory.entry(key)
        if entry is None:
            self.counters.add("load_misses")
            return False
        path = os.path.join(self.params.root, layout.object_path(key))
        try:
            with FrameFile(path, os.O_RDONLY, self._reading) as file:
                size = read_frame(file, key, memory, self._codec_of, self._io, deadline)
        except FileNotFoundError:
            self._drop(key, entry)
        except FrameError as error:
            self._heal(key, entry, path, error.damage.value, str(error))
        except NotAFileError:
            self._heal(key, entry, path, "not_a_file", "it is no regular file")
        except CodecUnavailableError:
            self.inventory.mark_unreadable(key, entry)
            self.counters.add("codec_unavailable")
        except ExpiredError:
            self.counters.add("load_expired")
        except OSError as error:
            if error.errno in _TRANSIENT:
                self.counters.add("load_errors")
                self._warn(f"reading {path}: {reason(error)}. The object is a miss this time")
            elif error.errno == errno.ELOOP:
                self._heal(key, entry, path, "not_a_file", "it is a link")
            else:
                self._heal(key, entry, path, "io", reason(error))
        else:
            self.counters.add("loaded_objects")
            self.counters.add("loaded_raw_bytes", len(memory.data))
            self.counters.add("loaded_bytes", size)
            return True
        return False

    def unlock(self, keys: Sequence[FrameKey]) -> None:
        """Takes one pin off each object."""
        self.inventory.unpin(keys)

    def delete(self, key: FrameKey) -> Entry | None:
        """Removes an object that nobody uses. It is not stored again before :meth:`settle`.

        Returns:
            What was removed, None where nothing was.
        """
        entry = self.inventory.take(key)
        if entry is None:
            if self.inventory.contains(key):
                self.counters.add("delete_skipped")
            return None
        path = os.path.join(self.params.root, layout.object_path(key))
        aside = None
        try:
            try:
                os.unlink(path)
            except IsADirectoryError:
                aside = self._set_aside(path, "not_a_file")
        except FileNotFoundError:
            pass
        except OSError as error:
            self.inventory.put_back(key, entry)
            self.counters.add("delete_errors")
            self._warn(f"deleting {path}: {reason(error)}")
            return None
        self._settle_files(entry, aside, path)
        self.counters.add("deleted_objects")
        self.counters.add("deleted_bytes", entry.size)
        return entry

    def settle(self, keys: Sequence[FrameKey]) -> None:
        """Lets objects that were removed be stored again, once everybody knows that they were."""
        self.inventory.settle(keys)

    def tick(self, *, is_last: bool = False) -> None:
        """What is due every :data:`HEARTBEAT_S` seconds: the heartbeat, times of use, sketch and daily figures."""
        for key, entry in self.inventory.take_used().items():
            path = os.path.join(self.params.root, layout.object_path(key))
            with contextlib.suppress(OSError):
                os.utime(path, ns=(entry.used_ns, entry.used_ns), follow_symlinks=False)
        self._sweep_temporary()
        try:
            self._registration.heartbeat()
            self.counters.save()
            self._read_rates.save()
            if self._admission is not None:
                self._admission.save(time.time(), is_last=is_last)
        except (KvpError, OSError) as error:
            self.counters.add("bookkeeping_errors")  # a full disk; the next tick tries again
            self._warn(str(error))

    def close(self) -> None:
        """Saves what must outlive this process and lets the next server in. Nothing may be running any more."""
        self.tick(is_last=True)
        self._registration.remove()
        self._lock.release()

    def status(self) -> dict[str, Any]:
        """Figures for people and monitoring; sizes in bytes."""
        usage = self.inventory.usage()
        root = self.params.root
        with self._quarantine_lock:
            quarantined = {"files": len(self._quarantine), "bytes": sum(file.size for file in self._quarantine)}
        return {
            "is_healthy": os.access(root, os.R_OK | os.W_OK | os.X_OK),
            "root": root,
            "codec": self.params.codec,
            "format": frames.FORMAT_NAME,
            "capacity_bytes": self.params.capacity_bytes,
            "used_bytes": sum(usage.values()),
            "object_bytes": usage["objects"],
            "objects": len(self.inventory),
            "writing_bytes": usage["reserved"],
            "temporary": {"files": len(self._temporary), "bytes": sum(self._temporary.values())},
            "unknown": {"files": len(self._unknown), "bytes": sum(file.size for file in self._unknown)},
            "quarantine": quarantined,
            "disk_free_bytes": _free_bytes(root),
            "min_free_bytes": self.params.min_free_bytes,
            "pinned_objects": self.inventory.pinned(),
            "scopes": self.inventory.scopes(),
            "scan_seconds": round(self.scan_s, 3),
            "cold_read_bytes_per_s": self._read_rates.values(),
            "counters": self.counters.values(),
            "written_bytes_by_day": self.counters.written_by_day(),
        }

    def _refusal(self, key: FrameKey, memory: Memory) -> Stored | None:
        if self.inventory.entry(key) is not None:
            self.counters.add("store_present")
            return Stored(True)
        try:
            frames.check_key(key)
        except ValueError:
            self.counters.add("rejected_key")
            return Stored(False)
        if self._admission is not None and not self._admission.admits(key, time.time()):
            self.counters.add("not_admitted")
            return Stored(True)
        length = len(memory.data)
        worst = frames.file_length(length if self._codec is None else worst_stored_length(length))
        answer = self.inventory.admit(key, worst)
        if answer is Admission.GRANTED:
            return None
        if answer in (Admission.PRESENT, Admission.WRITING):
            # Being written by another request is as good: whether that succeeds is told there.
            self.counters.add("store_present")
            return Stored(True)
        self.counters.add(f"rejected_{answer.value}")
        return Stored(False)

    def _write(
        self,
        key: FrameKey,
        path: str,
        temporary: str,
        model_name: str,
        memory: Memory,
        used_ns: int,
        deadline: float,
    ) -> int:
        self._registration.ensure()
        with self._open_new(key, model_name, temporary) as file:
            size = write_frame(file, key, memory, self._codec, self._io, deadline)
            self.counters.add_written(size)
            os.utime(file.descriptor, ns=(used_ns, used_ns))
            if self.params.fsync != "none":
                with self._writing:
                    (os.fsync if self.params.fsync == "full" else os.fdatasync)(file.descriptor)
        try:
            os.rename(temporary, path)
        except (IsADirectoryError, FileExistsError):  # a folder stands in an object's place
            aside = self._set_aside(path, "not_a_file")
            self.inventory.add_other_bytes(aside.size if aside else 0)
            self._keep_aside(aside)
            os.rename(temporary, path)
        if self.params.fsync == "full":
            _sync_folder(os.path.dirname(path))
        return size

    def _open_new(self, key: FrameKey, model_name: str, temporary: str) -> FrameFile:
        """Opens a file to write. Its folder may go just then, with the last object in it or by somebody's hand."""
        attempts = 0
        while True:
            try:
                self._prepare_folder(key, model_name)
                return FrameFile(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._writing)
            except FileNotFoundError:
                attempts += 1
                if attempts == _OPEN_ATTEMPTS:
                    raise
                self._folders.clear()
                self._model_names.clear()

    def _prepare_folder(self, key: FrameKey, model_name: str) -> None:
        folder = layout.folder(key.scope)
        relative = f"{folder}/{key.chunk_hash[:1].hex()}"
        if relative not in self._folders:
            for path in (os.path.join(self.params.root, folder), os.path.join(self.params.root, relative)):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o700)
                if self.params.fsync == "full":
                    _sync_folder(os.path.dirname(path))
            self._folders.add(relative)
        if self._model_names.get(folder) != model_name:
            # Written once for each start of an engine; two threads write the same.
            write_atomic(
                os.path.join(self.params.root, folder, layout.MODEL_FILE), layout.render_model_file(model_name)
            )
            self._model_names[folder] = model_name

    def _count_failed_store(self, error: BaseException) -> None:
        cause = error.__context__ if isinstance(error, KvpError) else error
        if isinstance(cause, OSError) and cause.errno in _FULL:
            self.counters.add("rejected_disk_full")
        elif isinstance(error, ExpiredError):
            self.counters.add("store_expired")
        else:
            self.counters.add("store_errors")
            self._warn(f"storing an object: {reason(error)}")

    def _codec_of(self, number: int) -> Codec:
        codec = self._codecs.get(number)
        if codec is None:
            codec = self._codecs[number] = make_codec(number)
        return codec

    def _drop(self, key: FrameKey, entry: Entry) -> None:
        self.counters.add("vanished_objects")
        if self.inventory.take(key, only=entry) is not None:
            self._settle_files(entry, None, os.path.join(self.params.root, layout.object_path(key)))
            self._tell_removed(key, entry)

    def _tell_removed(self, key: FrameKey, entry: Entry) -> None:
        try:
            self._on_removed(entry)
        finally:
            self.inventory.settle([key])

    def _heal(self, key: FrameKey, entry: Entry, path: str, kind: str, detail: str) -> None:
        """Makes a damaged object a miss that the next store writes again."""
        self.counters.add(f"damaged_{kind}")
        if self.inventory.take(key, only=entry) is None:
            return
        self._warn(f"{path} is damaged ({detail}). It is a miss and moved to {layout.QUARANTINE_FOLDER}")
        try:
            aside = self._set_aside(path, kind)
        except OSError as error:
            self._warn(f"removing {path}: {reason(error)}")
            self.inventory.put_back(key, entry)  # it is there and takes room: a miss that the next store replaces
            self.inventory.mark_unreadable(key, entry)
            return
        self._settle_files(entry, aside, path)
        self._tell_removed(key, entry)

    def _settle_files(self, entry: Entry, aside: OtherFile | None, path: str) -> None:
        """What follows when an object's file is gone from its path."""
        self.inventory.gone(entry, set_aside=aside.size if aside else 0)
        self._keep_aside(aside)
        _remove_if_empty(os.path.dirname(path))

    def _set_aside(self, path: str, kind: str) -> OtherFile | None:
        """Moves what stands in an object's place into the quarantine, or removes it where it cannot be moved.

        Returns:
            What is in the quarantine now.

        Raises:
            OSError: when it stays where it is.
        """
        folder = os.path.join(self.params.root, layout.QUARANTINE_FOLDER)
        parent = os.path.basename(os.path.dirname(os.path.dirname(path)))
        name = f"{time.time_ns()}-{kind}-{parent}-{os.path.basename(path)}"[:250]
        target = os.path.join(folder, name)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.rename(path, target)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"moving {path} to {layout.QUARANTINE_FOLDER}: {reason(error)}. It is removed")
            _remove(path)
            return None
        return OtherFile(f"{layout.QUARANTINE_FOLDER}/{name}", path_size(target), time.time())

    def _keep_aside(self, file: OtherFile | None) -> None:
        """Keeps a file whose bytes count already in the quarantine, within its limit."""
        if file is None:
            return
        with self._quarantine_lock:
            self._quarantine.append(file)
            self._trim_quarantine()

    def _trim_quarantine(self) -> None:
        limit = self.params.quarantine_limit()
        while self._quarantine and sum(file.size for file in self._quarantine) > limit:
            oldest = self._quarantine.popleft()
            try:
                _remove(os.path.join(self.params.root, oldest.path))
            except FileNotFoundError:
                pass  # an operator took it away
            except OSError as error:
                self._warn(f"removing {oldest.path} from quarantine: {reason(error)}")
                continue
            self.inventory.add_other_bytes(-oldest.size)
            self.counters.add("quarantine_removed")

    def _take_over(self, content: CacheContent, make_handle: Callable[[FrameKey, str], Any]) -> None:
        """Makes an earlier run's files this one's."""
        root = self.params.root
        self._model_names = content.model_names
        for used_ns, key, size, model_name in content.objects:
            self.inventory.add(key, make_handle(key, model_name), size, used_ns)
        self._quarantine.extend(content.quarantined)
        self._unknown = content.unknown
        self._temporary = {file.path: file.size for file in content.temporary}
        others = [*content.quarantined, *content.unknown, *content.temporary]
        self.inventory.add_other_bytes(sum(file.size for file in others))
        self._sweep_temporary()
        for file in content.damaged:
            self.counters.add("damaged_at_start")
            try:
                aside = self._set_aside(os.path.join(root, file.path), "start")
            except OSError as error:
                self._warn(f"removing {file.path}: {reason(error)}")
                self._unknown.append(file)
                self.inventory.add_other_bytes(file.size)
                continue
            self.inventory.add_other_bytes(aside.size if aside else 0)
            self._keep_aside(aside)
        with self._quarantine_lock:
            self._trim_quarantine()
        for leftover in content.leftovers:
            path = os.path.join(root, leftover)
            if os.path.isdir(path):
                _remove_if_empty(path)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _sweep_temporary(self) -> None:
        """Removes what dead writers left, and counts the rest against the cap at its present size."""
        root, now = self.params.root, time.time()
        observer = Observer(root, self._registration.marker, now)
        for path, counted in list(self._temporary.items()):
            full = os.path.join(root, path)
            try:
                status = os.lstat(full)
                writer = layout.parse_temporary_name(os.path.basename(path)) or ""
                if may_remove_temporary(observer.state(writer), now - status.st_mtime):
                    os.unlink(full)
                    _remove_if_empty(os.path.dirname(full))
                    self.counters.add("temporary_removed")
                    raise FileNotFoundError
            except FileNotFoundError:
                del self._temporary[path]
                self.inventory.add_other_bytes(-counted)
                continue
            except OSError as error:
                self._warn(f"removing {full}: {reason(error)}")
                continue
            self._temporary[path] = whole_pages(status.st_size)
            self.inventory.add_other_bytes(self._temporary[path] - counted)
        try:
            observer.remove_dead_markers()
        except OSError as error:
            self._warn(f"removing markers of dead writers: {reason(error)}")


def _prepare_root(root: str) -> None:
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        if os.stat(root).st_mode & 0o077:
            os.chmod(root, 0o700)  # KV can be turned back into the text it came from
    except OSError as error:
        raise UsageError(f"preparing {root}", reason(error), "Give the cache server a folder it owns.") from None


def _free_bytes(root: str) -> int:
    try:
        status = os.statvfs(root)
    except OSError:
        return 0  # a root that is gone takes no stores
    return status.f_bavail * status.f_frsize


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def _remove_if_empty(folder: str) -> None:
    # It would outlive its objects for ever, and take room that nobody counts.
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
