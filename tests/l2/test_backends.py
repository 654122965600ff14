"""LMCache's own adapters under the JSON that this project builds: what docs/l2-adapter.md says of them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvpersist.core.l2_backends import (
    BACKENDS,
    RAW_BLOCK_FILE,
    RAW_BLOCK_INDEX_S,
    Tier,
    adapter_config,
    backing_file,
)
from kvpersist.host.managed import manage_allocated_file
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config, parse_args_to_l2_adapters_config
from lmcache.v1.storage_backend.raw_block.core import _META_HEADER_STRUCT

from .harness import MIB, Driver, Memory, data_of, object_key
from .test_controllers import until

PAGE = 4096
SLOT = MIB + PAGE
FILES = ("fs_native", "nixl_store_dynamic", "fs")
LMCACHES = (*FILES, "raw_block")
every_backend = pytest.mark.parametrize("backend", LMCACHES)

Make = Callable[..., Driver]


def tier(root: Path, **changes: Any) -> Tier:
    return Tier(
        **{
            "root": str(root),
            "capacity_bytes": 32 * MIB,
            "min_free_bytes": 0,
            "codec": "none",
            "trigger_watermark": 0.8,
            "eviction_ratio": 0.2,
            "object_bytes": MIB,
            **changes,
        }
    )


def parsed(backend: str, wanted: Tier) -> Any:
    text = json.dumps(adapter_config(backend, wanted))
    (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[text])).adapters
    return config


def adapter_on(memory: Memory, backend: str, wanted: Tier) -> Driver:
    if BACKENDS[backend].has_slots:
        manage_allocated_file(*backing_file(wanted), check_mode=False)
    config = parsed(backend, wanted)
    adapter = create_l2_adapter(config, memory.description)
    adapter.set_backend_identity(get_type_name_for_config(config))
    return Driver(adapter)


@pytest.fixture
def start(memory: Memory, tmp_path: Path) -> Iterator[Make]:
    """Makes an adapter of a backend; each closes the one before, as a restart does."""
    running: list[Driver] = []

    def make_adapter(backend: str, root: Path = tmp_path, **changes: Any) -> Driver:
        while running:
            running.pop().adapter.close()
        running.append(adapter_on(memory, backend, tier(root, **changes)))
        return running[-1]

    yield make_adapter
    while running:
        running.pop().adapter.close()


@pytest.fixture
def objects(memory: Memory) -> Iterator[Callable[..., list[Any]]]:
    """Objects of the first tier, given back afterwards."""
    taken: list[Any] = []

    def take(count: int, size: int = MIB) -> list[Any]:
        taken.extend(memory.filled(count, size))
        return taken[-count:]

    yield take
    memory.free(taken)


def used(driver: Driver) -> int:
    return int(driver.adapter.get_usage().total_bytes_used)


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.iterdir())


def object_files(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_file())


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_lmcache_accepts_the_json_with_its_eviction(backend: str, tmp_path: Path) -> None:
    config = parsed(backend, tier(tmp_path))
    eviction = config.eviction_config
    assert (eviction.eviction_policy, eviction.trigger_watermark, eviction.eviction_ratio) == ("LRU", 0.8, 0.2)
    assert config.persist_config.persist_enabled
    assert config.serde_config is None


@pytest.mark.parametrize(
    ("backend", "capacity"), [("fs_native", 32 * MIB), ("nixl_store_dynamic", 32 * MIB), ("fs", 0)]
)
def test_the_budget_arrives_to_the_byte_where_there_is_one(
    start: Make, backend: str, capacity: int, tmp_path: Path
) -> None:
    driver = start(backend)
    assert driver.adapter.get_usage().total_capacity_bytes == capacity
    assert driver.adapter.supports_global_eviction == bool(capacity)
    assert on_disk(tmp_path) == 0


@every_backend
def test_objects_come_back_after_a_restart(
    start: Make, objects: Callable[..., list[Any]], memory: Memory, backend: str
) -> None:
    keys, stored = [object_key(number) for number in range(3)], objects(3)
    driver = start(backend)
    assert driver.store(keys, stored) > 0
    driver = start(backend)
    assert driver.lookup([*keys, object_key("other")]) == [0, 1, 2]
    loaded = memory.objects(3)
    assert driver.load(keys, loaded) == [0, 1, 2]
    assert [data_of(memory) for memory in loaded] == [data_of(memory) for memory in stored]
    memory.free(loaded)


@pytest.mark.parametrize(
    ("backend", "at_once", "after_lookup"),
    [("fs_native", 0, 0), ("nixl_store_dynamic", 0, MIB), ("fs", 0, 0), ("raw_block", 3 * SLOT, 3 * SLOT)],
)
def test_what_each_counts_after_a_restart(
    start: Make, objects: Callable[..., list[Any]], backend: str, at_once: int, after_lookup: int
) -> None:
    keys = [object_key(number) for number in range(3)]
    driver = start(backend)
    driver.store(keys, objects(3))
    assert used(driver) == 3 * (SLOT if backend == "raw_block" else MIB)
    driver = start(backend)
    assert used(driver) == at_once
    assert driver.lookup(keys[:1]) == [0]
    assert used(driver) == after_lookup


@every_backend
def test_none_of_them_verifies_what_it_loads(
    start: Make, objects: Callable[..., list[Any]], memory: Memory, backend: str, tmp_path: Path
) -> None:
    driver = start(backend)
    key, (stored,) = object_key(0), objects(1)
    driver.store([key], [stored])
    (path,) = object_files(tmp_path)
    offset = 77
    if backend == "raw_block":
        offset += adapter_config(backend, tier(tmp_path))["meta_total_bytes"] + PAGE
    start(backend)  # closes the first, which has the file open
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data_of(stored)[77] ^ 1]))
    driver = start(backend)
    (loaded,) = memory.objects(1)
    assert driver.load([key], [loaded] if driver.lookup([key]) else []) == [0]
    assert data_of(loaded) != data_of(stored)
    memory.free([loaded])


@pytest.mark.parametrize("backend", FILES)
def test_a_truncated_file_stays_a_miss_that_nothing_heals(
    start: Make, objects: Callable[..., list[Any]], memory: Memory, backend: str, tmp_path: Path
) -> None:
    key, stored, loaded = object_key(0), objects(1), memory.objects(1)
    start(backend).store([key], stored)
    (path,) = object_files(tmp_path)
    driver = start(backend)
    path.open("r+b").truncate(MIB // 2)
    assert driver.lookup([key]) == [0]
    assert driver.load([key], loaded) == []
    driver.store([key], stored)
    assert driver.load([key], loaded) == []
    assert path.stat().st_size == MIB // 2
    memory.free(loaded)


@pytest.mark.parametrize("backend", FILES)
def test_the_budget_is_not_kept(start: Make, objects: Callable[..., list[Any]], backend: str, tmp_path: Path) -> None:
    """What preflight warns of: over restarts, more than the budget lies on disk."""
    assert BACKENDS[backend].unkept_budget
    four = objects(4)
    for life in range(2):
        driver = start(backend, capacity_bytes=4 * MIB)
        driver.store([object_key((life, number)) for number in range(4)], four)
    assert on_disk(tmp_path) == 8 * MIB
    assert used(driver) == 4 * MIB


def test_raw_block_keeps_the_budget(start: Make, objects: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert not BACKENDS["raw_block"].unkept_budget
    driver = start("raw_block", capacity_bytes=8 * MIB)
    keys = [object_key(number) for number in range(8)]
    driver.store(keys, objects(8))
    assert driver.lookup(keys) == [0, 1, 2, 3, 4, 5]  # a page more than 1 MiB each, beside an index of 1 MiB
    assert [path.name for path in tmp_path.iterdir()] == [RAW_BLOCK_FILE]
    assert on_disk(tmp_path) == 8 * MIB
    driver.adapter.delete(keys[:2])
    driver.store(keys[6:], objects(2))
    assert driver.lookup(keys) == [2, 3, 4, 5, 6, 7]


def test_what_raw_block_has_not_written_into_its_index_is_lost_with_the_server(
    start: Make, objects: Callable[..., list[Any]], memory: Memory, tmp_path: Path
) -> None:
    """A copy of the file is what a SIGKILL at that moment leaves; the device's path is part of the index."""
    driver = start("raw_block")
    keys = [object_key(number) for number in range(3)]
    driver.store(keys, objects(3))
    core = driver.adapter.report_status()["core"]
    assert (core["metadata_dirty_total"], core["metadata_persisted"]) == (3, 0)
    shutil.copy(tmp_path / RAW_BLOCK_FILE, tmp_path / "at-once")

    def is_written() -> bool:
        core = driver.adapter.report_status()["core"]
        return bool(core["metadata_dirty_total"] == core["metadata_persisted"])

    until(is_written, RAW_BLOCK_INDEX_S + 30)
    shutil.copy(tmp_path / RAW_BLOCK_FILE, tmp_path / "later")
    for copy, survivors in (("at-once", []), ("later", [0, 1, 2])):
        driver.adapter.close()
        shutil.copy(tmp_path / copy, tmp_path / RAW_BLOCK_FILE)
        driver = adapter_on(memory, "raw_block", tier(tmp_path))
        assert driver.lookup(keys) == survivors
    driver.adapter.close()


def test_two_servers_on_one_file_of_raw_block_serve_each_other_s_bytes(
    start: Make, objects: Callable[..., list[Any]], memory: Memory, tmp_path: Path
) -> None:
    keys, stored, loaded = [object_key(0), object_key(1)], objects(2), memory.objects(1)
    first = start("raw_block")
    second = adapter_on(memory, "raw_block", tier(tmp_path))
    first.store(keys[:1], stored[:1])
    second.store(keys[1:], stored[1:])
    assert first.load(keys[:1], loaded) == [0]
    assert data_of(loaded[0]) == data_of(stored[1])
    second.adapter.close()
    memory.free(loaded)


def longest_model(backend: str) -> str:
    """A model path whose spelling in names of the backend is as long as is allowed."""
    start, spell = "/models/mimo/", BACKENDS[backend].spell
    return start + "m" * (BACKENDS[backend].longest_model_path - len(spell(start)))


@every_backend
def test_the_longest_model_path_is_stored_and_a_longer_one_is_not(
    start: Make, objects: Callable[..., list[Any]], backend: str
) -> None:
    driver, one = start(backend), objects(1)
    key = object_key(0, model=longest_model(backend))
    driver.store([key], one)
    assert driver.lookup([key]) == [0]
    longer = object_key(0, model=longest_model(backend) + "m")
    driver.store([longer], one)
    # raw_block has no names in the filesystem; its limit keeps the index from growing out of its place.
    assert driver.lookup([longer]) == ([0] if backend == "raw_block" else [])


def test_the_index_of_raw_block_has_room_for_every_slot(
    start: Make, objects: Callable[..., list[Any]], tmp_path: Path
) -> None:
    wanted = {"capacity_bytes": 12 * MIB, "object_bytes": PAGE}
    driver = start("raw_block", **wanted)
    slots = driver.adapter.report_status()["core"]["max_slots"]
    keys = [object_key(number, model=longest_model("raw_block")) for number in range(slots)]
    small = objects(64, PAGE)
    for first in range(0, slots, len(small)):
        batch = keys[first : first + len(small)]
        driver.store(batch, small[: len(batch)])
    assert len(driver.lookup(keys)) == slots
    driver = start("raw_block", **wanted)  # closing the one before wrote its index
    assert len(driver.lookup(keys)) == slots
    with (tmp_path / RAW_BLOCK_FILE).open("rb") as file:
        written = _META_HEADER_STRUCT.unpack(file.read(_META_HEADER_STRUCT.size))[3]
    assert 512 < written / slots <= 1024, "bytes of one entry, for which the layout reserves a KiB"


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ({}, {"capacity_bytes": 48 * MIB}, True),
        ({}, {"capacity_bytes": 24 * MIB}, True),
        ({}, {"capacity_bytes": 8 * MIB}, False),  # fewer slots than are in use
        ({}, {"object_bytes": MIB // 2}, False),  # slots of another size
        ({"object_bytes": PAGE, "capacity_bytes": 3 * MIB}, {"object_bytes": PAGE, "capacity_bytes": 4 * MIB}, False),
    ],
    ids=["grown", "shrunk", "too-small", "other-model", "larger-index"],
)
def test_raw_block_keeps_its_objects_or_drops_them_all_when_the_layout_changes(
    start: Make, objects: Callable[..., list[Any]], tmp_path: Path, before: Any, after: Any, kept: bool
) -> None:
    keys = [object_key(number) for number in range(12)]
    start("raw_block", **before).store(keys, objects(12, before.get("object_bytes", MIB)))
    assert start("raw_block", **after).lookup(keys) == (list(range(12)) if kept else [])
    assert on_disk(tmp_path) == tier(tmp_path, **after).capacity_bytes


def test_fs_and_fs_native_share_names_so_the_identity_must_tell_them_apart(
    start: Make, objects: Callable[..., list[Any]]
) -> None:
    key = object_key(0)
    start("fs").store([key], objects(1))
    assert start("fs_native").lookup([key]) == [0]
    formats = [backend.file_format for backend in BACKENDS.values()]
    assert len(set(formats)) == len(formats)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_backend_knows_its_own_files(
    make: Callable[..., Driver], start: Make, objects: Callable[..., list[Any]], backend: str, tmp_path: Path
) -> None:
    driver = make(root=str(tmp_path)) if backend == "kvpersist" else start(backend)
    driver.store([object_key(0), object_key(0, salt="salted")], objects(2))
    names = [path.name for path in tmp_path.iterdir()]
    assert names
    for other, properties in BACKENDS.items():
        same = other == backend or {other, backend} == {"fs", "fs_native"}
        # A leading dot is what this project's adapter keeps its own books under.
        objects_only = [name for name in names if not name.startswith(".")]
        assert [bool(properties.own_files.match(name)) for name in objects_only] == [same] * len(objects_only)
    assert all(BACKENDS[backend].own_files.match(name) for name in names)
