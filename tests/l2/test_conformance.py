"""LMCache's interface contract (lmcache 0.5.6, ``v1/distributed/l2_adapters/base.py``), for this adapter and LMCache's.

Each test is one line of the contract, or one thing that its controllers rely on. Where an adapter differs, ``DIFFERS``
says why; the table in docs/l2-adapter.md is made of it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.eviction import L2EvictionPolicy
from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config, parse_args_to_l2_adapters_config

from .harness import MIB, REPOSITORY, Driver, Memory, content, data_of, object_key, plugin, until

KEYS = [object_key(number) for number in range(6)]
ABSENT = object_key("absent")


def kvpersist(root: Path, objects: int) -> dict[str, Any]:
    return plugin(root, capacity_bytes=objects * (MIB + 4096))


def kvpersist_zstd(root: Path, objects: int) -> dict[str, Any]:
    return plugin(root, capacity_bytes=objects * (MIB + 8192), codec="zstd")


def fs(root: Path, objects: int) -> dict[str, Any]:
    return {"type": "fs", "base_path": str(root)}


def fs_native(root: Path, objects: int) -> dict[str, Any]:
    eviction = {"eviction_policy": "LRU"}
    return {"type": "fs_native", "base_path": str(root), "max_capacity_gb": objects / 1024, "eviction": eviction}


def raw_block(root: Path, objects: int) -> dict[str, Any]:
    device, meta = root / "device", 8 * MIB
    if not device.exists():
        root.mkdir()
        with device.open("wb") as file:
            file.truncate(meta + objects * (MIB + 4096))
    return {"type": "raw_block", "device_path": str(device), "slot_bytes": MIB + 4096, "meta_total_bytes": meta}


def nixl_store_dynamic(root: Path, objects: int) -> dict[str, Any]:
    params = {"file_path": str(root), "use_direct_io": "false", "max_capacity_gb": str(objects / 1024)}
    return {"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": params}


SUBJECTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "kvpersist": kvpersist,
    "kvpersist, zstd": kvpersist_zstd,
    "fs": fs,
    "fs_native": fs_native,
    "nixl_store_dynamic": nixl_store_dynamic,
    "raw_block": raw_block,
}

NO_CHECKSUM = "there is no checksum over an object"
NO_LENGTH = "it fills the buffer and does not look whether the object is longer"
NO_DTYPE = "nothing on disk tells the dtype"
NO_LISTING = "it is not implemented"
NAME_IN_FILE_NAME = "the whole model name is in a file name, which has at most 255 bytes"
FORGETS = "after a restart it knows nothing of what is on disk until a key is looked up or stored"
GHOSTS = "deleting what is gone already tells nobody: listeners and usage keep it for ever"

NOT_APPLICABLE = {name: [] for name in SUBJECTS}
NOT_APPLICABLE["raw_block"] = ["test_an_object_removed_from_outside_is_a_miss_and_forgotten"]
# By adapter and test; strict, so a new version that no longer differs shows up too.
DIFFERS: dict[str, dict[str, str]] = {
    "kvpersist": {},
    "kvpersist, zstd": {},
    "fs": {
        "test_a_long_model_name_is_no_error": NAME_IN_FILE_NAME,
        "test_a_pinned_object_is_not_deleted": "it keeps no pins",
        "test_pins_are_counted": "it keeps no pins",
        "test_a_store_beyond_the_capacity_is_refused": "it has no capacity",
        "test_usage_is_right_after_a_restart": FORGETS,
        "test_listeners_learn_after_a_restart_what_is_there": FORGETS,
        "test_a_flipped_bit_is_not_served_and_healed_by_the_next_store": NO_CHECKSUM,
        "test_an_object_of_another_length_is_not_served": NO_LENGTH,
        "test_an_object_of_another_dtype_is_not_served": NO_DTYPE,
        "test_an_object_removed_from_outside_is_a_miss_and_forgotten": GHOSTS,
        "test_keys_can_be_listed": NO_LISTING,
    },
    "fs_native": {
        "test_tasks_without_keys_are_answered": "its connector refuses them with an exception",
        "test_a_long_model_name_is_no_error": NAME_IN_FILE_NAME,
        "test_a_pinned_object_is_not_deleted": "it counts pins, and deletes all the same",
        "test_pins_are_counted": "it counts pins, and deletes all the same",
        "test_a_store_beyond_the_capacity_is_refused": "its capacity only tells when to evict",
        "test_what_landed_of_a_failed_store_is_told": "a task that fails in part tells nothing",
        "test_usage_is_right_after_a_restart": FORGETS,
        "test_listeners_learn_after_a_restart_what_is_there": FORGETS,
        "test_a_flipped_bit_is_not_served_and_healed_by_the_next_store": NO_CHECKSUM,
        "test_an_object_of_another_length_is_not_served": NO_LENGTH,
        "test_an_object_of_another_dtype_is_not_served": NO_DTYPE,
        "test_an_object_removed_from_outside_is_a_miss_and_forgotten": GHOSTS,
        "test_keys_can_be_listed": NO_LISTING,
    },
    "nixl_store_dynamic": {
        "test_a_long_model_name_is_no_error": NAME_IN_FILE_NAME,
        "test_usage_is_right_after_a_restart": FORGETS,
        "test_listeners_learn_after_a_restart_what_is_there": FORGETS,
        "test_a_flipped_bit_is_not_served_and_healed_by_the_next_store": NO_CHECKSUM,
        "test_an_object_of_another_length_is_not_served": NO_LENGTH,
        "test_an_object_of_another_dtype_is_not_served": NO_DTYPE,
        "test_keys_can_be_listed": NO_LISTING,
    },
    "raw_block": {
        "test_tasks_without_keys_are_answered": "it refuses them with an exception",
        "test_a_flipped_bit_is_not_served_and_healed_by_the_next_store": NO_CHECKSUM,
        "test_an_object_of_another_dtype_is_not_served": NO_DTYPE,
        "test_keys_can_be_listed": NO_LISTING,
    },
}


class Subject:
    """One adapter after the other on one folder, made from JSON as a server does."""

    def __init__(self, name: str, root: Path, memory: Memory) -> None:
        self.root = root
        self.memory = memory
        self._make = SUBJECTS[name]
        self._open: Any = None

    def start(self, objects: int = 100) -> Driver:
        """Closes the one before.

        Args:
            objects: how many objects of a MiB it has room for.
        """
        self.close()
        arguments = argparse.Namespace(l2_adapter=[json.dumps(self._make(self.root, objects))])
        try:
            (config,) = parse_args_to_l2_adapters_config(arguments).adapters
            adapter = create_l2_adapter(config, self.memory.description)
        except (RuntimeError, ValueError) as error:
            if "not installed" in str(error) or "unknown adapter type" in str(error):
                pytest.skip(f"it is not installed here: {error}")
            raise
        adapter.set_backend_identity(get_type_name_for_config(config))
        self._open = adapter
        return Driver(adapter)

    def close(self) -> None:
        adapter, self._open = self._open, None
        if adapter is not None:
            adapter.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    parameters = []
    for name in SUBJECTS:
        reason = DIFFERS[name].get(metafunc.function.__name__)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        if metafunc.function.__name__ in NOT_APPLICABLE[name]:
            marks.append(pytest.mark.skip(reason="its objects are no files"))
        parameters.append(pytest.param(name, marks=marks, id=name))
    metafunc.parametrize("subject", parameters, indirect=True)


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_path: Path, memory: Memory) -> Iterator[Subject]:
    made = Subject(request.param, tmp_path / "root", memory)
    yield made
    made.close()


@pytest.fixture
def objects(memory: Memory) -> Iterator[list[Any]]:
    made = memory.filled(len(KEYS))
    yield made
    memory.free(made)


@pytest.fixture
def targets(memory: Memory) -> Iterator[list[Any]]:
    made = memory.objects(len(KEYS))
    yield made
    memory.free(made)


def listen(driver: Driver) -> LRUEvictionPolicy:
    policy = LRUEvictionPolicy()
    driver.adapter.register_listener(L2EvictionPolicy(policy))
    return policy


def known(policy: LRUEvictionPolicy) -> set[Any]:
    return set(policy.get_eviction_candidates(len(KEYS) + 1))


def used(driver: Driver) -> int:
    return int(driver.adapter.get_usage().total_bytes_used)


def damage(root: Path, memory: Any) -> None:
    """Flips a bit of an object on disk, wherever its adapter keeps it."""
    start = data_of(memory)[:64]
    for path in root.rglob("*"):
        if not path.is_file() or path.stat().st_size < MIB // 2:
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            at = data.find(start)
            if at >= 0 or path.stat().st_size < MIB:  # the whole file of a compressed object
                data[max(at, 0) + MIB // 3] ^= 1
                data.flush()
                return
    raise AssertionError("the object is not there")


def test_the_three_descriptors_are_distinct(subject: Subject) -> None:
    one = subject.start().adapter
    assert len({one.get_store_event_fd(), one.get_lookup_and_lock_event_fd(), one.get_load_event_fd()}) == 3


def test_a_result_is_there_when_its_descriptor_says_so(subject: Subject, objects: Any, targets: Any) -> None:
    one = subject.start().adapter
    store = one.submit_store_task(KEYS, objects)
    assert select.select([one.get_store_event_fd()], [], [], 30)[0]
    assert store in one.pop_completed_store_tasks()
    lookup = one.submit_lookup_and_lock_task(KEYS, {})
    assert select.select([one.get_lookup_and_lock_event_fd()], [], [], 30)[0]
    assert one.query_lookup_and_lock_result(lookup) is not None
    load = one.submit_load_task(KEYS, targets)
    assert select.select([one.get_load_event_fd()], [], [], 30)[0]
    assert one.query_load_result(load) is not None


def test_what_is_stored_is_loaded(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    result = driver.store(KEYS, objects)
    assert result.is_successful()
    assert result.bytes_transferred() > 0
    assert driver.lookup(KEYS) == list(range(len(KEYS)))
    assert driver.load(KEYS, targets) == list(range(len(KEYS)))
    assert [data_of(one) for one in targets] == [data_of(one) for one in objects]


def test_bitmaps_have_one_bit_for_each_key_and_tell_hits_from_misses(
    subject: Subject, objects: Any, targets: Any
) -> None:
    driver = subject.start()
    driver.store([KEYS[1], KEYS[4]], objects[:2])
    assert driver.lookup(KEYS) == [1, 4]  # the driver compares the lengths
    assert driver.load(KEYS, targets) == [1, 4]
    assert data_of(targets[4]) == data_of(objects[1])


def test_a_result_is_given_once(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    driver.store(KEYS, objects)
    assert driver.adapter.pop_completed_store_tasks() == {}
    driver.lookup(KEYS)  # the driver asks twice
    driver.load(KEYS, targets)
    assert driver.adapter.query_lookup_and_lock_result(10**6) is None
    assert driver.adapter.query_load_result(10**6) is None


def test_tasks_without_keys_are_answered(subject: Subject) -> None:
    driver = subject.start()
    assert driver.lookup([]) == []
    assert driver.load([], []) == []
    assert driver.store([], []).is_successful()


def test_salts_are_apart(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    salted = [object_key(0, salt=salt) for salt in ("", "alice", "bob")]
    driver.store(salted[:2], objects[:2])
    assert driver.lookup(salted) == [0, 1]
    assert driver.load(salted, targets[:3]) == [0, 1]
    assert [data_of(one) for one in targets[:2]] == [data_of(one) for one in objects[:2]]
    usage = driver.adapter.get_usage()
    assert set(usage.bytes_by_cache_salt) == {"", "alice"}
    assert sum(usage.bytes_by_cache_salt.values()) == usage.total_bytes_used


def test_a_long_model_name_is_no_error(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    keys = [object_key(number, "/models/" + "m" * 200) for number in range(len(KEYS))]
    assert driver.store(keys, objects).is_successful()
    assert driver.load(keys, targets) == list(range(len(KEYS)))


def test_a_pinned_object_is_not_deleted(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    driver.store(KEYS, objects)
    driver.lookup(KEYS[:2], unlock=False)
    driver.adapter.delete(KEYS)
    assert driver.lookup(KEYS) == [0, 1]
    assert driver.load(KEYS[:2], targets[:2]) == [0, 1]
    driver.adapter.submit_unlock(KEYS[:2])
    time.sleep(0.1)
    driver.adapter.delete(KEYS)
    assert driver.lookup(KEYS) == []


def test_pins_are_counted(subject: Subject, objects: Any) -> None:
    driver = subject.start()
    driver.store(KEYS, objects)
    driver.lookup(KEYS[:1], unlock=False)
    driver.lookup(KEYS[:1], unlock=False)
    driver.adapter.submit_unlock(KEYS[:1])
    time.sleep(0.1)
    driver.adapter.delete(KEYS)
    assert driver.lookup(KEYS) == [0]


def test_unlocking_after_a_failed_load_and_unknown_keys_is_no_error(
    subject: Subject, objects: Any, targets: Any
) -> None:
    driver = subject.start()
    driver.store(KEYS[:1], objects[:1])
    driver.lookup([KEYS[0], ABSENT], unlock=False)
    assert driver.load([KEYS[0], ABSENT], targets[:2]) == [0]
    driver.adapter.submit_unlock([KEYS[0], ABSENT])
    driver.adapter.submit_unlock([KEYS[0], ABSENT])
    assert driver.store(KEYS, objects).is_successful()
    assert driver.load(KEYS, targets) == list(range(len(KEYS)))


def test_listeners_hear_of_stores_and_deletions(subject: Subject, objects: Any) -> None:
    driver = subject.start()
    policy = listen(driver)
    driver.store(KEYS, objects)
    until(lambda: known(policy) == set(KEYS), 2)
    driver.adapter.delete([*KEYS[:2], ABSENT])
    assert known(policy) == set(KEYS[2:])
    assert driver.lookup(KEYS) == [2, 3, 4, 5]


def test_listeners_hear_of_use(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    policy = listen(driver)
    for number, key in enumerate(KEYS):
        driver.store([key], objects[number : number + 1])
    driver.lookup(KEYS[:1])
    driver.load(KEYS[:1], targets[:1])
    until(lambda: policy.get_eviction_candidates(len(KEYS))[-1] == KEYS[0], 2)


def test_usage_grows_with_stores_once_and_ends_at_nothing(subject: Subject, objects: Any) -> None:
    driver = subject.start()
    driver.store(KEYS[:3], objects[:3])
    until(lambda: used(driver) > 3 * MIB // 2, 2)
    before = used(driver)
    assert driver.store(KEYS[:3], objects[:3]).is_successful()
    time.sleep(0.1)
    assert used(driver) == before
    driver.adapter.delete(KEYS)
    assert used(driver) == 0


def test_a_store_beyond_the_capacity_is_refused(subject: Subject, objects: Any) -> None:
    driver = subject.start(objects=2)
    assert not driver.store(KEYS, objects).is_successful()
    assert len(driver.lookup(KEYS)) == 2


def test_what_landed_of_a_failed_store_is_told(subject: Subject, objects: Any) -> None:
    driver = subject.start(objects=2)
    policy = listen(driver)
    # One fails for want of room, or for its long name where there is always room.
    keys = [KEYS[0], KEYS[1], object_key("long", "m" * 5000), KEYS[2]]
    assert not driver.store(keys, objects[: len(keys)]).is_successful()
    landed = {KEYS[hit] for hit in driver.lookup(KEYS)}
    assert landed
    until(lambda: known(policy) >= landed, 2)
    assert used(driver) >= len(landed) * MIB // 2


def test_objects_outlive_a_restart(subject: Subject, objects: Any, targets: Any) -> None:
    subject.start().store(KEYS, objects)
    driver = subject.start()
    assert driver.lookup(KEYS) == list(range(len(KEYS)))
    assert driver.load(KEYS, targets) == list(range(len(KEYS)))
    assert [data_of(one) for one in targets] == [data_of(one) for one in objects]


def test_usage_is_right_after_a_restart(subject: Subject, objects: Any) -> None:
    driver = subject.start()
    driver.store(KEYS, objects)
    until(lambda: used(driver) > 0, 2)
    before = used(driver)
    assert used(subject.start()) == before


def test_listeners_learn_after_a_restart_what_is_there(subject: Subject, objects: Any) -> None:
    subject.start().store(KEYS, objects)
    assert known(listen(subject.start())) == set(KEYS)


def test_a_flipped_bit_is_not_served_and_healed_by_the_next_store(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    driver.store(KEYS[:1], objects[:1])
    damage(subject.root, objects[0])
    assert driver.load(KEYS[:1], targets[:1]) == []
    assert driver.store(KEYS[:1], objects[:1]).is_successful()
    assert driver.load(KEYS[:1], targets[:1]) == [0]


def test_an_object_of_another_length_is_not_served(subject: Subject, memory: Memory, objects: Any) -> None:
    driver = subject.start()
    driver.store(KEYS[:1], objects[:1])
    smaller = memory.objects(1, MIB // 2)
    assert driver.load(KEYS[:1], smaller) == []
    memory.free(smaller)


def test_an_object_of_another_dtype_is_not_served(subject: Subject, memory: Memory, objects: Any) -> None:
    driver = subject.start()
    driver.store(KEYS[:1], objects[:1])
    other = memory.objects(1, MIB, torch.float16)
    assert driver.load(KEYS[:1], other) == []
    memory.free(other)


def test_an_object_removed_from_outside_is_a_miss_and_forgotten(subject: Subject, objects: Any, targets: Any) -> None:
    driver = subject.start()
    policy = listen(driver)
    driver.store(KEYS, objects)
    until(lambda: known(policy) == set(KEYS), 2)
    for path in subject.root.rglob("*"):
        if path.is_file() and path.stat().st_size > MIB // 2:
            path.unlink()
    assert driver.load(KEYS, targets) == []
    driver.adapter.delete(KEYS)
    assert not known(policy)
    assert used(driver) == 0


def test_keys_can_be_listed(subject: Subject, objects: Any) -> None:
    driver = subject.start()
    driver.store(KEYS, objects)
    page = driver.adapter.list_l2_keys(page_size=100)
    assert {entry.key.to_object_key() for entry in page.entries} == set(KEYS)


def test_health_is_reported(subject: Subject) -> None:
    assert subject.start().adapter.report_status()["is_healthy"] is True


def test_closing_during_stores_ends_them_all(subject: Subject, memory: Memory) -> None:
    keys, made = [object_key(number) for number in range(48)], memory.filled(48)
    adapter = subject.start().adapter
    for number, key in enumerate(keys):
        adapter.submit_store_task([key], [made[number]])
    subject.close()
    for one in made:  # LMCache gives the memory back right after
        one.byte_array.cast("B")[:] = bytes(MIB)
    read = memory.objects(48)
    driver = subject.start()
    found = driver.lookup(keys)
    loaded = driver.load([keys[hit] for hit in found], read[: len(found)]) if found else []
    assert all(data_of(read[at]) == content(found[at], MIB) for at in loaded)
    assert len(loaded) == len(found)
    memory.free(made)
    memory.free(read)


def test_closing_during_loads_leaves_the_memory_alone(subject: Subject, memory: Memory) -> None:
    keys, made = [object_key(number) for number in range(48)], memory.filled(48)
    driver = subject.start()
    assert driver.store(keys, made).is_successful()
    for number, key in enumerate(keys):
        driver.adapter.submit_load_task([key], [made[number]])
    subject.close()
    for one in made:
        one.byte_array.cast("B")[:] = bytes(MIB)
    time.sleep(0.3)
    assert all(data_of(one) == bytes(MIB) for one in made)
    memory.free(made)


def test_two_controllers_use_it_at_once(subject: Subject, memory: Memory) -> None:
    driver = subject.start()
    keys, made, read = [object_key(number) for number in range(32)], memory.filled(32), memory.objects(32)
    wrong: list[int] = []

    def load() -> None:
        for _ in range(20):
            hits = driver.lookup(keys)
            if not hits:
                continue
            loaded = driver.load([keys[hit] for hit in hits], read[: len(hits)])
            wrong.extend(hits[at] for at in loaded if data_of(read[at]) != content(hits[at], MIB))

    loader = threading.Thread(target=load)
    loader.start()
    for number in range(32):
        assert driver.store(keys[number : number + 1], made[number : number + 1]).is_successful()
    loader.join()
    assert not wrong
    assert driver.lookup(keys) == list(range(32))
    memory.free(made)
    memory.free(read)


def table() -> str:
    """Where adapters differ, as docs/l2-adapter.md has it."""
    columns = [name for name in SUBJECTS if name != "kvpersist, zstd"]
    tests = [
        name for name in globals() if name.startswith("test_") and any(name in differs for differs in DIFFERS.values())
    ]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for test in tests:
        cells = ["–" if test in NOT_APPLICABLE[name] else "no" if test in DIFFERS[name] else "yes" for name in columns]
        lines.append(f"| {test[5:].replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_says_where_adapters_differ() -> None:
    assert table() in (REPOSITORY / "docs" / "l2-adapter.md").read_text(encoding="utf-8"), table()


def test_every_difference_is_one_of_a_test() -> None:
    assert {test for differs in DIFFERS.values() for test in differs} <= set(globals())
