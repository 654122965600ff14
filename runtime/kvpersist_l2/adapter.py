"""LMCache's side of the disk tier: ``KvPersistL2Adapter`` for the adapter type ``plugin``.

The interface, and how its controllers use it, is that of lmcache 0.5.6: ``v1/distributed/l2_adapters/base.py`` and
``plugin_l2_adapter.py``, ``v1/distributed/storage_controllers/``.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from kvpersist.core import layout
from kvpersist.core.frames import PAGE, FrameKey, dtype_code
from kvpersist.core.writers import HEARTBEAT_S
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier
from lmcache.v1.platform.event_notifier import EventNotifier

from . import metrics
from .frame_io import Memory
from .inventory import Entry
from .params import parse_params
from .pool import Pool
from .tier import Stored, Tier

logger = init_logger(__name__)

_STEP_NS = 1000


class KvPersistL2Adapter(L2AdapterInterface):
    """Disk tier with a hard cap, verified frames and accounting that outlives restarts.

    Args:
        adapter_params: what :class:`kvpersist_l2.params.Params` lists.
        l1_memory_desc: LMCache's memory; unused, since objects come with their own address.

    Raises:
        UsageError: for wrong parameters, a root that cannot be used, or one that another server uses.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        del l1_memory_desc
        params = parse_params(adapter_params)
        super().__init__(max_capacity_bytes=params.capacity_bytes)
        self._params = params
        self._pool = Pool(params.thread_count(), lambda error: logger.error("Disk tier: %r", error))
        try:
            self._tier = Tier(
                params, _object_key, self._on_removed, logger.warning, self._pool.reads, self._pool.writes
            )
        except BaseException:
            self._pool.close(0)
            raise
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        self._are_events_open = True
        # What listeners are told about a key must arrive in the order in which it happened: whoever tells looks at the
        # state and tells under this lock. Reentrant, should a listener ask the adapter something.
        self._telling = threading.RLock()
        self._lock = threading.Lock()
        self._last_task = 0
        self._stores: dict[int, L2StoreResult] = {}
        self._lookups = _Results()
        self._loads = _Results()
        self._is_announced = False
        self._is_closed = False
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvpersist-l2-keeper", daemon=True)
        self._keeper.start()
        metrics.register(self)
        usage = self._tier.inventory.usage()
        logger.info(
            "Disk tier %s: %d objects, %d of %d bytes used, codec %s",
            params.root,
            len(self._tier.inventory),
            sum(usage.values()),
            params.capacity_bytes,
            params.codec,
        )

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        super().set_backend_identity(name, shared)
        if self._is_announced:
            return
        self._is_announced = True
        # Only now do events carry the adapter's name; accounting in the base class starts from what is on disk.
        with self._telling:
            entries = self._announced()
            if entries:
                self._notify_keys_stored([entry.handle for entry in entries], [entry.size for entry in entries])

    def register_listener(self, listener: L2AdapterListener) -> None:
        # Listeners come after the constructor, so they learn here what is on disk. The LRU policy goes through a list
        # backwards and takes the last as the newest (lmcache 0.5.6, eviction_policy/lru.py).
        with self._telling:
            super().register_listener(listener)
            entries = self._announced()
            if entries:
                listener.on_l2_keys_stored([entry.handle for entry in entries], [entry.size for entry in entries])

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self._new_task()
        now_ns = time.time_ns()
        deadline = time.monotonic() + self._params.store_deadline_s
        results: list[Stored | None] = [None] * len(keys)

        def finish() -> None:
            self._finish_store(task, keys, results)

        countdown = _Countdown(len(keys), finish)
        jobs = [
            self._store_job(key, memory, now_ns - position * _STEP_NS, deadline, results, position, countdown)
            for position, (key, memory) in enumerate(zip(keys, objects))
        ]
        if not self._pool.write(jobs):
            countdown.cancel()
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stores = self._stores, {}
        return done

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        del group_layout_descs
        task = self._new_task()
        # The index is in memory: a thread would only add its latency.
        frame_keys = [_frame_key(key) for key in keys]
        hits = self._tier.lookup(frame_keys)
        found = Bitmap(len(keys))
        if hits:
            found.batched_set(hits)
            # Looked up is used: what L1 serves for now must not be the first to go here.
            self._notify_keys_accessed(self._tier.inventory.handles(frame_keys, hits))
        self._lookups.put(task, found, self._params.result_ttl_s)
        self._signal(self._lookup_event)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._tier.unlock([_frame_key(key) for key in keys])

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self._new_task()
        deadline = time.monotonic() + self._params.load_deadline_s
        results = [False] * len(keys)

        def finish() -> None:
            loaded = Bitmap(len(keys))
            loaded.batched_set([position for position, is_loaded in enumerate(results) if is_loaded])
            self._loads.put(task, loaded, self._params.result_ttl_s)
            self._signal(self._load_event)

        countdown = _Countdown(len(keys), finish)
        jobs = [
            self._load_job(key, memory, deadline, results, position, countdown)
            for position, (key, memory) in enumerate(zip(keys, objects))
        ]
        if not self._pool.read(jobs):
            countdown.cancel()
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        # An exception from here would end eviction for every adapter (storage_controllers/eviction_controller.py).
        try:
            self._delete(keys)
        except Exception:
            logger.exception("Disk tier: deleting %d objects", len(keys))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, it is {page_size}")
        position = 0 if cursor is None else int(cursor)
        entries = self._tier.inventory.newest_first()
        if model_name is not None:
            entries = [entry for entry in entries if entry.handle.model_name == model_name]
        end = position + page_size
        page = tuple(KeyEntry(entry.handle.to_encoded_object_key(), entry.size) for entry in entries[position:end])
        return KeyListPage(page, str(end) if end < len(entries) else None)

    def get_usage(self) -> AdapterUsage:
        usage = super().get_usage()
        # Files being written, residue and quarantine take room under the cap too, so they count for the watermark.
        return AdapterUsage(
            total_bytes_used=self._tier.inventory.used_bytes(),
            total_capacity_bytes=usage.total_capacity_bytes,
            bytes_by_cache_salt=usage.bytes_by_cache_salt,
        )

    def report_status(self) -> dict[str, Any]:
        status = self._tier.status()
        reads, writes = self._pool.queued()
        is_running = self._pool.is_alive() and self._keeper.is_alive()
        status["is_healthy"] = status["is_healthy"] and is_running and not self._is_closed
        status.update(
            type=type(self).__name__,
            threads=self._params.thread_count(),
            io=self._params.io,
            fsync=self._params.fsync,
            admission=self._params.admission,
            queued_loads=reads,
            queued_stores=writes,
            unread_results=len(self._lookups) + len(self._loads),
            # Without one nothing makes room: the cap then refuses stores for ever.
            listeners=len(self._listeners),
        )
        return status

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        metrics.unregister(self)
        dropped = self._pool.close(self._params.close_timeout_s)
        if dropped:
            logger.warning("Disk tier: %d queued reads and writes were dropped at close", dropped)
        self._stop.set()
        self._keeper.join()
        self._tier.close()
        with self._lock:
            self._are_events_open = False
            for event in (self._store_event, self._lookup_event, self._load_event):
                event.close()

    def _signal(self, event: EventNotifier) -> None:
        """Wakes the controller; its result must be there already, since signals before it looks are one signal."""
        with self._lock:
            if self._are_events_open:
                event.notify()

    def _new_task(self) -> int:
        with self._lock:
            self._last_task += 1
            return self._last_task

    def _store_job(
        self,
        key: ObjectKey,
        memory: MemoryObj,
        used_ns: int,
        deadline: float,
        results: list[Stored | None],
        position: int,
        countdown: _Countdown,
    ) -> Callable[[], None]:
        def run() -> None:
            try:
                results[position] = self._tier.store(
                    _frame_key(key), key, key.model_name, _memory(memory), used_ns, deadline
                )
            finally:
                countdown.done()

        return run

    def _load_job(
        self,
        key: ObjectKey,
        memory: MemoryObj,
        deadline: float,
        results: list[bool],
        position: int,
        countdown: _Countdown,
    ) -> Callable[[], None]:
        def run() -> None:
            try:
                results[position] = self._tier.load(_frame_key(key), _memory(memory), deadline)
            finally:
                countdown.done()

        return run

    def _finish_store(self, task: int, keys: list[ObjectKey], results: list[Stored | None]) -> None:
        written = sum(stored.written for stored in results if stored is not None)
        is_success = all(stored is not None and stored.is_success for stored in results)
        try:
            self._announce(keys, results)
        except Exception:
            # A listener failed. Without a result LMCache would keep the task's memory locked.
            logger.exception("Disk tier: announcing %d stored objects", len(keys))
        with self._lock:
            self._stores[task] = L2StoreResult(is_success, written)
        self._signal(self._store_event)

    def _announced(self) -> list[Entry]:
        return [entry for entry in self._tier.inventory.newest_first() if entry.is_announced]

    def _announce(self, keys: list[ObjectKey], results: list[Stored | None]) -> None:
        """Tells listeners what a store task brought."""
        landed: list[Entry] = []
        with self._telling:
            for key, stored in zip(keys, results):
                if stored is None or stored.entry is None:
                    continue
                if stored.replaced is not None:
                    self._forget([stored.replaced])
                if self._tier.inventory.holds(_frame_key(key), stored.entry):  # not removed again meanwhile
                    stored.entry.is_announced = True
                    landed.append(stored.entry)
            if landed:
                # One call for the task, in the request's order, which is what the LRU policy relies on.
                self._notify_keys_stored([entry.handle for entry in landed], [entry.size for entry in landed])

    def _delete(self, keys: list[ObjectKey]) -> None:
        frame_keys = [_frame_key(key) for key in keys]
        removed: dict[FrameKey, Entry] = {}
        try:
            for frame_key in frame_keys:
                entry = self._tier.delete(frame_key)
                if entry is not None:
                    removed[frame_key] = entry
            with self._telling:
                # Gone before: a policy that still knows it would offer it for ever.
                absent = [
                    key
                    for key, frame_key in zip(keys, frame_keys)
                    if frame_key not in removed and not self._tier.inventory.contains(frame_key)
                ]
                self._forget(list(removed.values()), absent)
        finally:
            self._tier.settle(list(removed))

    def _on_removed(self, entry: Entry) -> None:
        with self._telling:
            self._forget([entry])

    def _forget(self, entries: list[Entry], absent: Sequence[ObjectKey] = ()) -> None:
        """Tells listeners what is gone: objects they know, and keys that have none."""
        known = [entry for entry in entries if entry.is_announced]
        handles = [*(entry.handle for entry in known), *absent]
        if handles:
            self._notify_keys_deleted(handles, [*(entry.size for entry in known), *(0 for _ in absent)])

    def _keep(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                self._tier.tick()
                self._lookups.expire()
                self._loads.expire()
            except Exception:
                logger.exception("Disk tier: housekeeping")


class _Results:
    """Results by task, each taken once, dropped when nobody asks for them in time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[int, tuple[Bitmap, float]] = {}

    def __len__(self) -> int:
        return len(self._results)

    def put(self, task: int, result: Bitmap, ttl_s: float) -> None:
        with self._lock:
            self._results[task] = (result, time.monotonic() + ttl_s)

    def take(self, task: int) -> Bitmap | None:
        with self._lock:
            result = self._results.pop(task, None)
        return None if result is None else result[0]

    def expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._results = {task: result for task, result in self._results.items() if result[1] > now}


class _Countdown:
    """Calls a function when the last of several jobs is done; at once where there are none."""

    def __init__(self, count: int, finish: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._finish = finish
        if not count:
            finish()

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._finish()

    def cancel(self) -> None:
        """For jobs none of which will run."""
        if self._left:
            self._finish()


def _frame_key(key: ObjectKey) -> FrameKey:
    return FrameKey(layout.scope(key.model_name), key.kv_rank, key.object_group_id, key.chunk_hash, key.cache_salt)


def _object_key(key: FrameKey, model_name: str) -> ObjectKey:
    return ObjectKey(key.chunk_hash, model_name, key.kv_rank, key.object_group, key.cache_salt)


def _memory(memory: MemoryObj) -> Memory:
    element_size, code = _elements(tuple(memory.get_dtypes()))
    view = memoryview(memory.byte_array).cast("B")
    return Memory(view, element_size, code, memory.data_ptr % PAGE == 0)


@functools.lru_cache(maxsize=64)
def _elements(dtypes: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes of one element and the code of an object's dtypes."""
    sizes = {dtype.itemsize for dtype in dtypes}
    return sizes.pop() if len(sizes) == 1 else 1, dtype_code([str(dtype).removeprefix("torch.") for dtype in dtypes])
