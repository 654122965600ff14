"""host.l2_tier: what a backend needs, and what it holds, read from a real folder or from a server that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvp_kit import CONFIG, Deployed, Spawn, start_stub_cache
from kvpersist.core.errors import InconclusiveError, UsageError
from kvpersist.core.l2_backends import BACKENDS
from kvpersist.host.l2_tier import cache_server, held_bytes, manage_backing_file, stored_bytes

MIB = 1 << 20
# Two layers of two KV heads, 16 + 16 elements of two bytes each, 256 tokens.
OBJECT = 2 * 2 * 32 * 2 * 256


@pytest.fixture
def with_slots(deployed: Deployed) -> Deployed:
    deployed.settings.update(cache_server_l2_backend="raw_block", kvp_cache_budget_gb=0.016)
    (deployed.root / "l2").mkdir()
    return deployed


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, OBJECT),
        ({"kvp_chunk_size": 512}, 2 * OBJECT),
        ({"vllm_engine_tensor_parallel_size": 2}, OBJECT // 2),
        ({"vllm_engine_kv_cache_dtype": "fp8"}, OBJECT // 2),
        ({"vllm_engine_extra_args": "-pp 2"}, OBJECT // 2),
    ],
)
def test_the_size_of_an_object_follows_from_model_and_settings(
    with_slots: Deployed, settings: dict[str, Any], size: int
) -> None:
    with_slots.settings.update(settings)
    assert cache_server(with_slots.deployment).object_bytes == size


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"raw_block"}))
def test_a_backend_without_slots_needs_neither_model_nor_file(deployed: Deployed, backend: str) -> None:
    deployed.settings.update(cache_server_l2_backend=backend, kvp_model_dir="/nowhere")
    deployment = deployed.deployment
    assert cache_server(deployment) is deployment.cache
    assert manage_backing_file(deployment, check_mode=False) is None
    assert not (deployed.root / "l2").exists()


def test_a_model_whose_objects_cannot_be_told_is_refused(with_slots: Deployed) -> None:
    (with_slots.model / "config.json").write_text(json.dumps({**CONFIG, "index_head_dim": 128}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"the indexer .* Take another cache_server_l2_backend than raw_block\."):
        cache_server(with_slots.deployment)


def test_the_file_of_slots_is_as_large_as_the_budget(with_slots: Deployed) -> None:
    change = manage_backing_file(with_slots.deployment, check_mode=False)
    assert change is not None
    assert (change.path, change.before) == (f"{with_slots.root}/l2/raw-block.data", "")
    assert Path(change.path).stat().st_size == 16_000_000 // 4096 * 4096


@pytest.mark.parametrize(
    ("backend", "own"),
    [
        ("kvpersist", {"kvp-" + "a" * 32, "x-" + "b" * 32, ".quarantine"}),
        ("fs", {"-SEP-m@0x01000100@0@" + "c" * 64 + ".data"}),
        ("fs_native", {"-SEP-m@0x01000100@0@" + "c" * 64 + ".data"}),
        ("nixl_store_dynamic", {"--m_01000100_0_" + "d" * 64 + ".bin.tmp." + "e" * 32}),
        ("raw_block", {"raw-block.data"}),
    ],
)
def test_a_backend_s_own_bytes_are_told_from_those_of_others(deployed: Deployed, backend: str, own: set[str]) -> None:
    root = deployed.root / "l2"
    deployed.settings["cache_server_l2_backend"] = backend
    assert held_bytes(deployed.deployment.cache) == (0, 0)
    for folder in ("kvp-" + "a" * 32, "x-" + "b" * 32, ".quarantine"):
        (root / folder / "ab").mkdir(parents=True)
        (root / folder / "ab" / "object").write_bytes(b"x" * 4096)
    for name in (
        "-SEP-m@0x01000100@0@" + "c" * 64 + ".data",
        "--m_01000100_0_" + "d" * 64 + ".bin.tmp." + "e" * 32,
        "raw-block.data",
        "notes.txt",
    ):
        (root / name).write_bytes(b"x" * 4096)
    assert held_bytes(deployed.deployment.cache) == (len(own) * 4096, (7 - len(own)) * 4096)


def test_files_say_themselves_what_is_stored(deployed: Deployed) -> None:
    (deployed.root / "l2").mkdir()
    (deployed.root / "l2" / "object.bin").write_bytes(b"x" * 5000)
    assert stored_bytes(deployed.deployment.cache) == (5000, 0)


def test_a_server_with_slots_is_asked_what_is_stored_and_what_it_has_not_written(
    with_slots: Deployed, spawn: Spawn
) -> None:
    start_stub_cache(with_slots, spawn)
    core = {"indexed_key_count": 3, "slot_bytes": MIB, "metadata_dirty_total": 5, "metadata_persisted": 3}
    with_slots.answer(status={"storage_manager": {"l2_adapters": [{"core": core}]}})
    assert stored_bytes(with_slots.deployment.cache) == (3 * MIB, 2)
    with_slots.answer(status={"storage_manager": {"l2_adapters": [{"type": "other"}]}})
    with pytest.raises(InconclusiveError, match="it does not tell what raw_block holds"):
        stored_bytes(with_slots.deployment.cache)
