"""The L2 adapters a deployment can choose: what each can do, its JSON, and how that JSON is read back.

What is said here of LMCache's own adapters was read in lmcache 0.5.6 (``lmcache/v1/distributed/l2_adapters`` and
``lmcache/v1/storage_backend/raw_block``) and is tested against it in ``tests/l2/test_backends.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from .errors import UsageError
from .frames import FORMAT_NAME

# Compressing codecs and what the name says is lost with them; KV that is not bit-exact is never offered.
LOSSY_CODECS = ("fp8", "turboquant", "lbq", "cachegen", "kivi")

_PLUGIN_MODULE = "kvpersist_l2.adapter"
_PLUGIN_CLASS = "KvPersistL2Adapter"
_GIB = 1024**3
_PAGE = 4096

# The file in which raw_block keeps its slots, below the tier's root.
RAW_BLOCK_FILE = "raw-block.data"
# raw_block writes its index as JSON, twice, into the head of its file, and no longer writes it once it does not fit.
# One object takes at most this much of it, with the longest model path that is allowed.
_RAW_BLOCK_ENTRY = 1024
_RAW_BLOCK_LEAST_INDEX = 1 << 20
# What is not in the last index is lost when the server is killed. Each write holds the whole index.
RAW_BLOCK_INDEX_S = 10


@dataclass(frozen=True)
class Tier:
    """What a deployment asks of its L2 tier.

    Attributes:
        root: folder of the tier.
        capacity_bytes: the disk budget.
        min_free_bytes: what must stay free on the disk, where the adapter can see to it.
        codec: one of the backend's codecs.
        trigger_watermark, eviction_ratio: LMCache's LRU eviction, as shares of the capacity.
        object_bytes: the largest object, for a backend that has slots of one size; 0 where that is not known.
    """

    root: str
    capacity_bytes: int
    min_free_bytes: int
    codec: str
    trigger_watermark: float
    eviction_ratio: float
    object_bytes: int = 0


@dataclass(frozen=True)
class Backend:
    """One L2 adapter.

    Attributes:
        codecs: what it can compress with.
        file_format: name of its file format, an identity field.
        own_files: what the names of its files and folders in the root look like.
        longest_model_path: bytes that its names leave for the value of ``--model``.
        adapter: its part of the JSON of ``--l2-adapter``.
        spell: how its names write the value of ``--model``.
        needs_runtime: whether LMCache's process imports this project's packages for it.
        package: distribution that LMCache's environment needs for it, as its dist-info folder is called.
        has_slots: whether it keeps objects in slots of one size, in one file that must be there before it starts.
        unkept_budget: why it may take more of the disk than the budget; empty where it cannot.
    """

    codecs: tuple[str, ...]
    file_format: str
    own_files: re.Pattern[str]
    longest_model_path: int
    adapter: Callable[[Tier], dict[str, Any]]
    spell: Callable[[str], str] = str
    needs_runtime: bool = False
    package: str = ""
    has_slots: bool = False
    unkept_budget: str = ""


def _kvpersist(tier: Tier) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": _PLUGIN_MODULE,
        "class_name": _PLUGIN_CLASS,
        "adapter_params": {
            "root": tier.root,
            "capacity_bytes": tier.capacity_bytes,
            "min_free_bytes": tier.min_free_bytes,
            "codec": tier.codec,
        },
    }


def _fs_native(tier: Tier) -> dict[str, Any]:
    # LMCache reads the capacity as GiB; dividing whole bytes by a power of two is exact, so the budget arrives to the
    # byte.
    return {"type": "fs_native", "base_path": tier.root, "max_capacity_gb": tier.capacity_bytes / _GIB}


def _fs(tier: Tier) -> dict[str, Any]:
    return {"type": "fs", "base_path": tier.root}


def _nixl_store_dynamic(tier: Tier) -> dict[str, Any]:
    # Its parameters reach NIXL's own plugin too, which takes text only. POSIX is the plugin that needs no GPU.
    parameters = {
        "file_path": tier.root,
        "use_direct_io": "false",
        "max_capacity_gb": repr(tier.capacity_bytes / _GIB),
    }
    return {"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": parameters}


def _raw_block(tier: Tier) -> dict[str, Any]:
    path, size = backing_file(tier)
    slot = _pages(tier.object_bytes) + _PAGE
    index = _RAW_BLOCK_LEAST_INDEX
    # A power of two, since LMCache drops all objects when the size of the index changes: a budget that grows by a
    # little keeps them.
    while index < 2 * (_RAW_BLOCK_ENTRY * (size // slot) + 2 * _PAGE):
        index *= 2
    if size < index + slot:
        raise UsageError(
            "laying out the slots of raw_block",
            f"a budget of {tier.capacity_bytes} bytes holds no object of {tier.object_bytes} bytes",
            "Raise kvp_cache_budget_gb.",
        )
    return {
        "type": "raw_block",
        "device_path": path,
        "capacity_bytes": size,
        "slot_bytes": slot,
        "meta_total_bytes": index,
        "meta_checkpoint_interval_sec": RAW_BLOCK_INDEX_S,
    }


def backing_file(tier: Tier) -> tuple[str, int]:
    """Path and bytes of the file that a backend with slots keeps everything in."""
    return f"{tier.root}/{RAW_BLOCK_FILE}", tier.capacity_bytes // _PAGE * _PAGE


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


_FLAT_FILES = re.compile(r"[^.].*@(0x)?[0-9a-f]{8}@[0-9a-f]+@[0-9a-f]{64}")

BACKENDS: Mapping[str, Backend] = {
    "kvpersist": Backend(
        ("none", "zstd", "lz4"),
        FORMAT_NAME,
        re.compile(r"\.|(kvp|x)-[0-9a-f]{32}\Z"),
        # The namespace is a folder there, so the path is bounded by what one file beside the objects may say.
        1024,
        _kvpersist,
        needs_runtime=True,
    ),
    # Both append rank, group, chunk hash and a suffix to the path, in a name of at most 255 bytes.
    "fs_native": Backend(
        ("none",),
        "raw",
        _FLAT_FILES,
        172,
        _fs_native,
        spell=lambda path: path.replace("/", "-SEP-"),
        unkept_budget="it counts from zero after a restart, and what lies there from before is never removed",
    ),
    "nixl_store_dynamic": Backend(
        ("none",),
        "nixl-raw",
        re.compile(r"[^.].*_[0-9a-f]{8}_[0-9a-f]+_[0-9a-f]{64}"),
        138,
        _nixl_store_dynamic,
        spell=lambda path: path.replace("/", "--"),
        package="nixl",
        unkept_budget="after a restart it counts a file only once a request has met it, and never removes the others",
    ),
    "fs": Backend(
        ("none",),
        "fs-raw",
        _FLAT_FILES,
        172,
        _fs,
        spell=lambda path: path.replace("/", "-SEP-"),
        unkept_budget="it knows no limit and never removes anything",
    ),
    "raw_block": Backend(
        ("none",),
        "raw-block",
        re.compile(re.escape(RAW_BLOCK_FILE) + r"\Z"),
        512,  # of an entry of its index
        _raw_block,
        spell=lambda path: quote(path, safe=""),
        package="lmcache_rust_raw_block_io",
        has_slots=True,
    ),
}


def adapter_config(backend: str, tier: Tier) -> dict[str, Any]:
    """JSON of ``--l2-adapter``. The eviction block is always there: without it LMCache never makes room.

    Raises:
        UsageError: when the budget is too small for the backend.
    """
    return {
        **BACKENDS[backend].adapter(tier),
        "eviction": {
            "eviction_policy": "LRU",
            "trigger_watermark": tier.trigger_watermark,
            "eviction_ratio": tier.eviction_ratio,
        },
    }


def backend_of(config: Mapping[str, Any]) -> Backend | None:
    """The backend that a running server's ``--l2-adapter`` names, or None where it is not one of ours."""
    if config.get("type") == "plugin":
        ours = (config.get("module_path"), config.get("class_name")) == (_PLUGIN_MODULE, _PLUGIN_CLASS)
        return BACKENDS["kvpersist"] if ours else None
    return BACKENDS.get(str(config.get("type")))


def codec_of(config: Mapping[str, Any]) -> str:
    """The codec that a running server's ``--l2-adapter`` names; LMCache's own ``serde`` counts as one."""
    serde = config.get("serde")
    params = config.get("adapter_params")
    if serde:
        return str(serde)
    return str(params.get("codec", "none")) if isinstance(params, dict) else "none"
