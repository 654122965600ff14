"""The adapter through LMCache's interface, as its controllers use it."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpersist.core import frames, layout
from kvpersist.core.errors import UsageError
from kvpersist_l2.adapter import KvPersistL2Adapter
from lmcache.v1.distributed.eviction import L2EvictionPolicy
from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy

from .harness import MIB, NAMESPACE, Driver, Memory, content, data_of, object_key

Make = Callable[..., Driver]
FRAME = MIB + frames.PAGE


def files(driver: Driver) -> list[Path]:
    return sorted(Path(driver.adapter.report_status()["root"]).glob("*/??/*.bin"))


def path_of(driver: Driver, key: Any) -> Path:
    frame_key = frames.FrameKey(
        layout.scope(key.model_name), key.kv_rank, key.object_group_id, key.chunk_hash, key.cache_salt
    )
    return Path(driver.adapter.report_status()["root"]) / layout.object_path(frame_key)


@pytest.fixture
def objects(memory: Memory) -> Any:
    made = memory.filled(4)
    yield made
    memory.free(made)


@pytest.fixture
def targets(memory: Memory) -> Any:
    made = memory.objects(4)
    yield made
    memory.free(made)


KEYS = [object_key(number) for number in range(4)]


def test_descriptors_are_distinct(make: Make) -> None:
    one = make().adapter
    assert len({one.get_store_event_fd(), one.get_lookup_and_lock_event_fd(), one.get_load_event_fd()}) == 3


@pytest.mark.parametrize("io", ["auto", "buffered", "direct"])
@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("size", [2, 4098, MIB, 5 * MIB + 6])
def test_what_is_stored_is_loaded(make: Make, memory: Memory, codec: str, io: str, size: int) -> None:
    driver = make(codec=codec, io=io)
    made, read = memory.filled(3, size), memory.objects(3, size)
    result = driver.store(KEYS[:3], made)
    assert result.is_successful()
    assert result.bytes_transferred() == sum(path.stat().st_size for path in files(driver))
    for path in files(driver):  # so that they come from the disk
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert driver.lookup(KEYS) == [0, 1, 2]
    assert driver.load(KEYS[:3], read) == [0, 1, 2]
    assert [data_of(one) for one in read] == [data_of(one) for one in made]
    memory.free(made)
    memory.free(read)


def test_objects_of_mixed_element_sizes_are_loaded(make: Make, memory: Memory) -> None:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    driver = make(codec="zstd")
    desc = MemoryLayoutDesc([torch.Size([1000]), torch.Size([3001])], [torch.bfloat16, torch.uint8])
    _, (one, other) = memory._manager.allocate(desc, 2)
    one.byte_array.cast("B")[:] = content(1, 5001)
    assert driver.store(KEYS[:1], [one]).is_successful()
    assert driver.load(KEYS[:1], [other]) == [0]
    assert data_of(other) == data_of(one)
    memory.free([one, other])


def test_bitmaps_tell_hit_from_miss(make: Make, objects: Any, targets: Any) -> None:
    driver = make()
    driver.store([KEYS[1], KEYS[3]], objects[:2])
    assert driver.lookup(KEYS) == [1, 3]
    assert driver.load(KEYS, targets) == [1, 3]
    assert driver.lookup([]) == []
    assert driver.load([], []) == []
    assert driver.store([], []).is_successful()


def test_the_path_before_the_namespace_does_not_matter(make: Make, objects: Any, targets: Any) -> None:
    driver = make()
    driver.store(KEYS, objects)
    elsewhere = [object_key(number, f"/other/{NAMESPACE}") for number in range(4)]
    assert driver.load(elsewhere, targets) == [0, 1, 2, 3]
    assert driver.lookup([object_key(0, f"/models/kvp-{'6' * 32}"), object_key(0, salt="a")]) == []


def test_salts_are_apart_and_survive_a_restart(make: Make, objects: Any, targets: Any) -> None:
    driver = make()
    keys = [object_key(0, salt=salt) for salt in ("", "alice", "bob")] + [object_key(0, "gpt2", salt="alice")]
    driver.store(keys, objects)
    assert driver.adapter.get_usage().bytes_by_cache_salt == {"": FRAME, "alice": 2 * FRAME, "bob": FRAME}
    driver = make()
    assert driver.adapter.get_usage().bytes_by_cache_salt == {"": FRAME, "alice": 2 * FRAME, "bob": FRAME}
    assert driver.load(keys, targets) == [0, 1, 2, 3]
    assert [data_of(one) for one in targets] == [data_of(one) for one in objects]


def test_storing_again_writes_nothing(make: Make, objects: Any) -> None:
    driver = make()
    assert driver.store(KEYS, objects).bytes_transferred() == 4 * FRAME
    assert driver.store(KEYS, objects).bytes_transferred() == 0
    assert driver.adapter.get_usage().total_bytes_used == 4 * FRAME


def test_a_key_twice_in_one_task_is_one_object(make: Make, memory: Memory) -> None:
    driver = make(threads=4)
    made = memory.filled(1)
    assert driver.store([KEYS[0]] * 6, made * 6).is_successful()
    assert driver.adapter.get_usage().total_bytes_used == FRAME
    memory.free(made)


def test_a_listener_that_fails_costs_no_result(make: Make, objects: Any) -> None:
    class Failing(L2EvictionPolicy):
        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            raise RuntimeError("no")

    driver = make()
    driver.adapter.register_listener(Failing(LRUEvictionPolicy()))
    assert driver.store(KEYS, objects).is_successful()


def test_listeners_hear_of_a_key_in_the_order_in_which_it_happened(make: Make, objects: Any) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(L2EvictionPolicy):
        def on_l2_keys_deleted(self, keys: Any) -> None:
            entered.set()
            assert go_on.wait(30)
            super().on_l2_keys_deleted(keys)

    driver = make()
    policy = LRUEvictionPolicy()
    driver.adapter.register_listener(Slow(policy))
    driver.store(KEYS[:1], objects[:1])
    deletion = threading.Thread(target=driver.adapter.delete, args=(KEYS[:1],))
    deletion.start()
    assert entered.wait(30)
    threading.Timer(0.2, go_on.set).start()
    assert not driver.store(KEYS[:1], objects[:1]).is_successful(), "its end has not been told yet"
    deletion.join()
    assert driver.counters()["rejected_leaving"] == 1
    assert driver.store(KEYS[:1], objects[:1]).is_successful()
    assert policy.get_num_tracked_keys() == 1


def test_a_root_that_is_gone_is_unhealthy_and_hurts_nobody(make: Make, objects: Any, targets: Any) -> None:
    import shutil

    driver = make()
    driver.store(KEYS, objects)
    shutil.rmtree(driver.adapter.report_status()["root"])
    assert driver.load(KEYS, targets) == []
    assert not driver.store(KEYS, objects).is_successful()
    assert not driver.adapter.report_status()["is_healthy"]
    driver.adapter.delete(KEYS)
    assert driver.adapter.get_usage().total_bytes_used == 0


def test_a_partly_failed_store_keeps_and_reports_what_landed(make: Make, objects: Any) -> None:
    driver = make(capacity_bytes=2 * FRAME + 100)
    policy = LRUEvictionPolicy()
    driver.adapter.register_listener(L2EvictionPolicy(policy))
    assert not driver.store(KEYS, objects).is_successful()
    assert len(driver.lookup(KEYS)) == 2
    assert policy.get_num_tracked_keys() == 2
    assert driver.adapter.get_usage().total_bytes_used == 2 * FRAME
    assert driver.counters()["rejected_capacity"] == 2


def test_pinned_objects_are_not_deleted_until_they_are_unlocked(make: Make, objects: Any) -> None:
    driver = make()
    driver.store(KEYS, objects)
    driver.lookup(KEYS[:2], unlock=False)
    driver.lookup(KEYS[:1], unlock=False)
    driver.adapter.delete(KEYS)
    assert driver.lookup(KEYS) == [0, 1]
    assert len(files(driver)) == 2
    driver.adapter.submit_unlock(KEYS[:2])
    driver.adapter.delete(KEYS)
    assert driver.lookup(KEYS) == [0], "it was pinned twice"
    driver.adapter.submit_unlock(KEYS)
    driver.adapter.submit_unlock(KEYS)
    driver.adapter.delete(KEYS)
    assert driver.lookup(KEYS) == []
    assert driver.adapter.get_usage().total_bytes_used == 0


def test_pins_of_an_aborted_request_lapse(make: Make, objects: Any) -> None:
    driver = make(pin_ttl_s=1)
    driver.store(KEYS, objects)
    driver.lookup(KEYS, unlock=False)
    assert driver.adapter.report_status()["pinned_objects"] == 4
    time.sleep(1.1)
    assert driver.adapter.report_status()["pinned_objects"] == 0
    driver.adapter.delete(KEYS)
    assert driver.lookup(KEYS) == []


def test_results_that_nobody_reads_lapse(make: Make, objects: Any) -> None:
    driver = make(result_ttl_s=0)
    task = driver.adapter.submit_lookup_and_lock_task(KEYS, {})
    assert driver.adapter.report_status()["unread_results"] == 1
    driver.adapter._lookups.expire()
    assert driver.adapter.report_status()["unread_results"] == 0
    assert driver.adapter.query_lookup_and_lock_result(task) is None


def test_delete_tells_listeners_of_what_is_gone_already(make: Make, objects: Any) -> None:
    driver = make()
    policy = LRUEvictionPolicy()
    driver.adapter.register_listener(L2EvictionPolicy(policy))
    driver.store(KEYS, objects)
    for path in files(driver)[:2]:
        path.unlink()
    driver.adapter.delete([*KEYS, object_key("never stored")])
    assert policy.get_num_tracked_keys() == 0
    assert driver.adapter.get_usage().total_bytes_used == 0


def test_a_file_removed_from_outside_is_a_miss_and_forgotten(make: Make, objects: Any, targets: Any) -> None:
    driver = make()
    driver.store(KEYS, objects)
    path_of(driver, KEYS[1]).unlink()
    assert driver.load(KEYS, targets) == [0, 2, 3]
    assert driver.lookup(KEYS) == [0, 2, 3]
    assert driver.adapter.get_usage().total_bytes_used == 3 * FRAME
    assert driver.store(KEYS, objects).bytes_transferred() == FRAME


def test_a_folder_purged_from_outside_is_made_again(make: Make, objects: Any, targets: Any) -> None:
    import shutil

    driver = make()
    driver.store(KEYS, objects)
    shutil.rmtree(Path(driver.adapter.report_status()["root"]) / NAMESPACE)
    assert driver.load(KEYS, targets) == []
    assert driver.store(KEYS, objects).is_successful()
    assert make().load(KEYS, targets) == [0, 1, 2, 3]


def test_delete_and_usage_never_raise(make: Make, objects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make()
    driver.store(KEYS, objects)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail)
        driver.adapter.delete(KEYS)
    assert driver.adapter.get_usage().total_bytes_used == 4 * FRAME
    assert driver.lookup(KEYS) == [0, 1, 2, 3]
    driver.adapter.delete([None])
    assert driver.adapter.get_usage().total_bytes_used == 4 * FRAME


def test_usage_and_order_of_use_survive_a_restart(make: Make, memory: Memory) -> None:
    driver = make()
    keys, made = [object_key(number) for number in range(12)], memory.filled(12)
    driver.store(keys[:4], made[:4])
    driver.store(keys[4:8], made[4:8])
    driver.store(keys[8:], made[8:])
    driver.lookup(keys[:4])  # the oldest are used again
    expected = [7, 6, 5, 4, 11, 10, 9, 8, 3, 2, 1, 0]  # later chunks of a request go first
    for restart in range(2):
        driver = make()
        policy = LRUEvictionPolicy()
        driver.adapter.register_listener(L2EvictionPolicy(policy))
        assert policy.get_eviction_candidates(12) == [keys[number] for number in expected], restart
        usage = driver.adapter.get_usage()
        assert usage.total_bytes_used == 12 * FRAME
        assert usage.bytes_by_cache_salt == {"": 12 * FRAME}
    memory.free(made)


def test_a_restart_under_another_path_keeps_one_key_for_each_object(make: Make, objects: Any) -> None:
    make().store(KEYS, objects)
    driver = make()
    policy = LRUEvictionPolicy()
    driver.adapter.register_listener(L2EvictionPolicy(policy))
    moved = [object_key(number, f"/moved/{NAMESPACE}") for number in range(4)]
    assert driver.lookup(moved) == [0, 1, 2, 3]
    driver.store(moved, objects)
    assert policy.get_num_tracked_keys() == 4
    driver.adapter.delete(policy.get_eviction_candidates(4))
    assert policy.get_num_tracked_keys() == 0
    assert driver.lookup(moved) == []


def test_closing_waits_for_everything_that_runs(make: Make, memory: Memory) -> None:
    driver = make(threads=2)
    keys, made = [object_key(number) for number in range(16)], memory.filled(16, 4 * MIB)
    driver.adapter.submit_store_task(keys, made)
    driver.adapter.close()
    for one in made:
        one.byte_array.cast("B")[:16] = bytes(16)  # LMCache gives the memory back right after
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvpersist-l2")]
    driver = make()
    read = memory.objects(16, 4 * MIB)
    hits = driver.load(keys, read)
    assert hits == list(range(16))
    assert all(data_of(read[number]) == content(number, 4 * MIB) for number in hits)
    driver.adapter.close()
    assert driver.adapter.submit_load_task(keys, read) > 0, "a task after the end is answered, not crashed on"
    memory.free(made)
    memory.free(read)


def test_closing_drops_what_would_take_too_long(make: Make, memory: Memory) -> None:
    driver = make(threads=1, close_timeout_s=0)
    keys, made = [object_key(number) for number in range(24)], memory.filled(24, 4 * MIB)
    driver.adapter.submit_store_task(keys, made)
    driver.adapter.close()
    assert not list(Path(driver.adapter._params.root).rglob("*.tmp.*"))
    assert len(files(make())) < 24
    memory.free(made)


def test_memory_is_not_used_past_its_time(make: Make, objects: Any, targets: Any) -> None:
    driver = make(store_deadline_s=0)
    assert not driver.store(KEYS, objects).is_successful()
    assert driver.counters()["store_expired"] == 4
    assert driver.adapter.get_usage().total_bytes_used == 0
    driver = make()
    assert driver.store(KEYS, objects).is_successful()
    driver = make(load_deadline_s=0)
    assert driver.load(KEYS, targets) == []
    assert driver.counters()["load_expired"] == 4
    assert make().load(KEYS, targets) == [0, 1, 2, 3], "that was no damage"


@pytest.mark.parametrize("io", ["auto", "buffered", "direct"])
def test_raw_objects_need_no_memory(make: Make, memory: Memory, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make(threads=1, io=io)
    size = 32 * MIB
    made, read = memory.filled(1, size), memory.objects(1, size)
    keys = [object_key(number) for number in range(9)]
    driver.store(keys[:1], made)
    driver.load(keys[:1], read)  # buffers of the threads are made

    def refuse(*_: object) -> None:
        raise AssertionError("memory that tracemalloc does not see")

    monkeypatch.setattr(mmap, "mmap", refuse)
    gc.collect()
    tracemalloc.start()
    try:
        peaks = []
        start = tracemalloc.get_traced_memory()[0]
        for key in keys[1:]:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert driver.store([key], made).is_successful()
            assert driver.load([key], read) == [0]
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        kept = (tracemalloc.get_traced_memory()[0] - start) // len(peaks)
    finally:
        tracemalloc.stop()
    assert data_of(read[0]) == data_of(made[0])
    assert max(peaks) < 16_000, f"{max(peaks)} bytes for one object of {size}"
    assert kept < 2_048, f"{kept} bytes stay for each object, more than its place in the index"
    memory.free(made)
    memory.free(read)


def test_the_root_is_private(make: Make, objects: Any) -> None:
    driver = make()
    driver.store(KEYS, objects)
    root = Path(driver.adapter.report_status()["root"])
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_two_servers_on_one_root_are_refused(make: Make) -> None:
    driver = make()
    with pytest.raises(UsageError, match=rf"used by process {os.getpid()} on "):
        KvPersistL2Adapter({"root": driver.adapter._params.root, "capacity_bytes": 1 << 30})


def test_keys_are_listed_by_page(make: Make, objects: Any) -> None:
    driver = make()
    driver.store(KEYS, objects)
    page = driver.adapter.list_l2_keys(page_size=3)
    rest = driver.adapter.list_l2_keys(page_size=3, cursor=page.next_page_token)
    assert [entry.key.to_object_key() for entry in [*page.entries, *rest.entries]] == KEYS
    assert rest.next_page_token is None
    assert driver.adapter.list_l2_keys(model_name="other").entries == ()
    with pytest.raises(ValueError, match="positive"):
        driver.adapter.list_l2_keys(page_size=0)


def test_second_hit_admission(make: Make, objects: Any) -> None:
    driver = make(admission="second-hit")
    assert driver.store(KEYS, objects).bytes_transferred() == 0
    driver = make(admission="second-hit")
    assert driver.store(KEYS, objects).bytes_transferred() == 4 * FRAME
    assert driver.adapter.report_status()["written_bytes_by_day"]


@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
def test_objects_of_another_codec_are_read(make: Make, objects: Any, targets: Any, codec: str) -> None:
    make(codec="zstd").store(KEYS[:2], objects[:2])
    make(codec="lz4").store(KEYS[2:], objects[2:])
    driver = make(codec=codec)
    assert driver.load(KEYS, targets) == [0, 1, 2, 3]
    assert [data_of(one) for one in targets] == [data_of(one) for one in objects]


def test_objects_of_a_codec_that_is_not_here_are_misses_until_stored_again(
    make: Make, objects: Any, targets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(codec="zstd").store(KEYS, objects)
    driver = make()
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "zstandard", None)
        assert driver.load(KEYS[:2], targets[:2]) == []
        assert driver.lookup(KEYS[:2]) == []
        assert driver.counters()["codec_unavailable"] == 2
        assert driver.store(KEYS[:2], objects[:2]).is_successful()
        assert driver.load(KEYS[:2], targets[:2]) == [0, 1]
        with pytest.raises(UsageError, match="zstandard"):
            make(codec="zstd")
    assert make().load(KEYS, targets) == [0, 1, 2, 3]
    assert driver.adapter._params.codec == "none"
