"""What the tests of the adapter share. They need LMCache, so they run in its environment with pytest beside it."""

from __future__ import annotations

import hashlib
import os
import select
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.platform import consume_fd

NAMESPACE = "kvp-" + "5" * 32
MIB = 1 << 20


def object_key(number: object, model: str = f"/models/mimo/{NAMESPACE}", salt: str = "") -> ObjectKey:
    chunk_hash = hashlib.blake2b(repr(number).encode(), digest_size=32).digest()
    return ObjectKey(chunk_hash, model, 0x01000100, 0, salt)


class Memory:
    """LMCache's own first tier: real memory, real memory objects."""

    def __init__(self, size: int) -> None:
        self._manager = L1MemoryManager(L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name=""))
        self.description = self._manager.get_l1_memory_desc()

    def objects(self, count: int, size: int = MIB, dtype: Any = torch.bfloat16) -> list[Any]:
        layout = MemoryLayoutDesc([torch.Size([size // dtype.itemsize])], [dtype])
        error, objects = self._manager.allocate(layout, count)
        assert len(objects) == count, error
        return list(objects)

    def filled(self, count: int, size: int = MIB, seed: int = 0) -> list[Any]:
        objects = self.objects(count, size)
        for number, memory in enumerate(objects):
            memory.byte_array.cast("B")[:] = content(seed + number, size)
        return objects

    def free(self, objects: list[Any]) -> None:
        self._manager.free(objects)

    def close(self) -> None:
        self._manager.close()


def content(seed: int, size: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size // 2 + 1, generator=generator).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()[:size]


def data_of(memory: Any) -> bytes:
    return bytes(memory.byte_array)


class Driver:
    """Uses an adapter as LMCache's controllers do: submit, wait for the descriptor, ask."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: list[Any], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        done: dict[int, Any] = {}
        self._wait(
            self.adapter.get_store_event_fd(),
            lambda: done.update(self.adapter.pop_completed_store_tasks()) or (task in done),
        )
        return done[task]

    def lookup(self, keys: list[Any], *, unlock: bool = True) -> list[int]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        found = self._result(
            self.adapter.get_lookup_and_lock_event_fd(), self.adapter.query_lookup_and_lock_result, task
        )
        assert len(found) == len(keys)
        hits = found.get_indices_list()
        if unlock:
            self.adapter.submit_unlock([keys[hit] for hit in hits])
        return list(hits)

    def load(self, keys: list[Any], objects: list[Any]) -> list[int]:
        task = self.adapter.submit_load_task(keys, objects)
        found = self._result(self.adapter.get_load_event_fd(), self.adapter.query_load_result, task)
        assert len(found) == len(keys)
        return list(found.get_indices_list())

    def counters(self) -> dict[str, int]:
        return dict(self.adapter.report_status()["counters"])

    def _result(self, descriptor: int, query: Callable[[int], Any], task: int) -> Any:
        results: list[Any] = []

        def is_ready() -> bool:
            result = query(task)
            if result is not None:
                results.append(result)
            return result is not None

        self._wait(descriptor, is_ready)
        assert query(task) is None, "a result is given once"
        return results[0]

    @staticmethod
    def _wait(descriptor: int, is_ready: Callable[[], bool], timeout_s: float = 60) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        end = time.monotonic() + timeout_s
        while not is_ready():
            assert time.monotonic() < end, "no result"
            if poll.poll(500):
                consume_fd(descriptor)
