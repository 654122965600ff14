"""The adapter under LMCache's own controllers: store after write, prefetch, watermark eviction."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.storage_manager import StorageManager

from .harness import MIB, content, object_key, plugin, storage_manager, until
from .test_damage import flip

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 256, 256])], [torch.bfloat16])
FRAME = MIB + 4096


def manager(root: Path, capacity: int, codec: str) -> StorageManager:
    return storage_manager(plugin(root, capacity_bytes=capacity, codec=codec), watermark=0.5)


def write(storage: StorageManager, keys: list[Any], seed: int = 0) -> None:
    for number, (_, memory) in enumerate(storage.reserve_write(keys, LAYOUT).items()):
        memory.byte_array.cast("B")[:] = content(seed + number, MIB)
    storage.finish_write(keys)


def status(storage: StorageManager) -> dict[str, Any]:
    return dict(storage.report_status()["l2_adapters"][0])


def prefetch(storage: StorageManager, keys: list[Any]) -> int:
    handle = storage.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
    results: list[Any] = []

    def is_done() -> bool:
        results.append(storage.query_prefetch_status(handle))
        return results[-1] is not None

    until(is_done)
    hits = results[-1].hit_cells[0].get_indices_list()
    found = [keys[hit] for hit in hits]
    with storage.read_prefetched_results(found) as objects:
        for hit, memory in zip(hits, objects or []):
            assert bytes(memory.byte_array) == content(hit, MIB)
    storage.finish_read_prefetched(found)
    return int(results[-1].l2_hit_cells[0].popcount())


@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
def test_objects_come_back_from_disk_after_a_restart(tmp_path: Path, codec: str) -> None:
    keys = [object_key(number) for number in range(12)]
    storage = manager(tmp_path, 1 << 30, codec)
    write(storage, keys)
    until(lambda: status(storage)["objects"] == 12)
    storage.close()

    storage = manager(tmp_path, 1 << 30, codec)
    assert prefetch(storage, keys) == 12
    assert status(storage)["counters"]["loaded_objects"] == 12
    assert status(storage)["pinned_objects"] == 0, "the controller unlocked them"
    assert storage.report_status()["is_healthy"]
    storage.close()


def test_a_damaged_object_ends_the_prefix_and_serves_nothing_wrong(tmp_path: Path) -> None:
    keys = [object_key(number) for number in range(6)]
    storage = manager(tmp_path, 1 << 30, "none")
    write(storage, keys)
    until(lambda: status(storage)["objects"] == 6)
    storage.close()
    (path,) = tmp_path.glob(f"*/*/*{keys[3].chunk_hash.hex()}.bin")
    flip(path, 4096 + 77)

    storage = manager(tmp_path, 1 << 30, "none")
    assert prefetch(storage, keys) == 3
    assert status(storage)["counters"]["damaged_checksum"] == 1
    storage.close()


def test_the_watermark_makes_room_and_the_cap_holds(tmp_path: Path) -> None:
    capacity = 10 * FRAME
    storage = manager(tmp_path, capacity, "none")
    for batch in range(6):
        write(storage, [object_key((batch, number)) for number in range(4)])
        until(lambda: status(storage)["queued_stores"] == 0)
        assert status(storage)["used_bytes"] <= capacity
        time.sleep(0.4)
    until(lambda: status(storage)["used_bytes"] < capacity * 0.5)
    counters = status(storage)["counters"]
    assert counters["deleted_objects"] > 0
    assert status(storage)["used_bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*/*/*.bin"))
    storage.close()


def test_after_a_restart_what_was_unused_longest_goes_first(tmp_path: Path) -> None:
    first, second, third = ([object_key((batch, number)) for number in range(4)] for batch in range(3))
    storage = manager(tmp_path, 1 << 30, "none")
    for batch in (first, second, third):
        write(storage, batch)
        until(lambda: status(storage)["queued_stores"] + status(storage)["writing_bytes"] == 0)
    until(lambda: status(storage)["objects"] == 12)
    prefetch(storage, first)
    storage.close()

    storage = manager(tmp_path, 16 * FRAME, "none")
    until(lambda: status(storage)["objects"] <= 8)
    left = {path.name.split("-")[2][:64] for path in tmp_path.glob("*/??/*.bin")}
    assert {key.chunk_hash.hex() for key in first} <= left
    assert not {key.chunk_hash.hex() for key in second} & left
    storage.close()
