"""The L2 adapters a deployment can choose: what each can do, its JSON, and how that JSON is read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .frames import FORMAT_NAME

# Compressing codecs and what the name says is lost with them; KV that is not bit-exact is never offered.
LOSSY_CODECS = ("fp8", "turboquant", "lbq", "cachegen", "kivi")

_PLUGIN_MODULE = "kvpersist_l2.adapter"
_PLUGIN_CLASS = "KvPersistL2Adapter"
_GIB = 1024**3


@dataclass(frozen=True)
class Tier:
    """What a deployment asks of its L2 tier.

    Attributes:
        root: folder of the tier.
        capacity_bytes: the disk budget.
        min_free_bytes: what must stay free on the disk, where the adapter can see to it.
        codec: one of the backend's codecs.
        trigger_watermark, eviction_ratio: LMCache's LRU eviction, as shares of the capacity.
    """

    root: str
    capacity_bytes: int
    min_free_bytes: int
    codec: str
    trigger_watermark: float
    eviction_ratio: float


@dataclass(frozen=True)
class Backend:
    """One L2 adapter.

    Attributes:
        codecs: what it can compress with.
        file_format: name of its file format, an identity field.
        longest_model_path: characters that its file names leave for the value of ``--model``.
        adapter: its part of the JSON of ``--l2-adapter``.
        needs_runtime: whether LMCache's process imports this project's packages for it.
    """

    codecs: tuple[str, ...]
    file_format: str
    longest_model_path: int
    adapter: Callable[[Tier], dict[str, Any]]
    needs_runtime: bool = False


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
    # LMCache reads the capacity as GiB (0.5.6, native_connector_l2_adapter.py); dividing whole bytes by a power of two
    # is exact, so the budget arrives to the byte.
    return {"type": "fs_native", "base_path": tier.root, "max_capacity_gb": tier.capacity_bytes / _GIB}


BACKENDS: Mapping[str, Backend] = {
    # The namespace is a folder there, so the path is bounded by what one file beside the objects may say.
    "kvpersist": Backend(("none", "zstd", "lz4"), FORMAT_NAME, 1024, _kvpersist, needs_runtime=True),
    # fs_native (lmcache 0.5.6) appends rank, group, chunk hash and a temporary suffix, in a name of at most 255 bytes.
    "fs_native": Backend(("none",), "raw", 172, _fs_native),
}


def adapter_config(backend: str, tier: Tier) -> dict[str, Any]:
    """JSON of ``--l2-adapter``. The eviction block is always there: without it LMCache never makes room."""
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
