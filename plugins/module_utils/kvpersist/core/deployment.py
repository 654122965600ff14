"""Typed views of a deployment's settings: what the cache server, the engine and the host's folders need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .engine_args import parse_options
from .errors import UsageError
from .l2_backends import BACKENDS, LOSSY_CODECS
from .settings import Value, to_text

_PINNED_IMAGE = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}\Z")
# LMCache and its connector take the address without brackets, so IPv6 loopback is not offered.
_LOOPBACK = ("127.0.0.1", "localhost")
# LMCache's --l1-align-bytes, in whose units NIXL describes the first tier.
_L1_PAGE = 4096


@dataclass(frozen=True)
class CacheServer:
    """The LMCache server of one host. Sizes in GB are 10^9 bytes except where LMCache defines its own unit.

    ``runtime_dir`` holds this project's packages for LMCache's process, where the L2 backend needs them.
    ``object_bytes`` is the size of the largest KV object, 0 until ``host.l2_tier`` has looked it up for a backend that
    needs it.
    """

    launch_mode: str
    device: str
    venv: str
    image: str
    host: str
    port: int
    http_port: int
    chunk_size: int
    l1_size_gb: float
    l2_backend: str
    root: str
    budget_gb: float
    min_free_gb: float
    evict_trigger_watermark: float
    evict_ratio: float
    codec: str
    log_level: str
    runtime_dir: str
    object_bytes: int = 0

    @property
    def http_url(self) -> str:
        """Base URL of the administration interface; it listens on loopback whatever ``host`` is."""
        return f"http://127.0.0.1:{self.http_port}"


@dataclass(frozen=True)
class Engine:
    """The vLLM server of one host. ``cpu_kvcache_space_gb`` and ``cpu_offload_gb`` are GiB, as vLLM defines them."""

    launch_mode: str
    device: str
    variant: str
    venv: str
    image: str
    model_dir: str
    model_id: str
    model_revision: str
    model_family: str
    models_dir: str
    served_model_name: str
    host: str
    port: int
    tensor_parallel_size: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_dtype: str
    block_size: int
    enforce_eager: bool
    gpu_memory_utilization: float
    cpu_kvcache_space_gb: float
    cpu_offload_gb: float
    extra_args: tuple[str, ...]
    kv_persist: bool
    namespace_override: str
    cache_host: str
    cache_port: int

    @property
    def url(self) -> str:
        """Base URL of the OpenAI-compatible API, as seen from the host itself."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def container(self) -> str:
        """Name of the engine's container, e.g. ``mimo-pro-tp4-kvp``."""
        return f"{self.model_family}-tp{self.tensor_parallel_size}-kvp"


@dataclass(frozen=True)
class Deployment:
    """Everything that one host runs and where it keeps it."""

    home: str
    config_dir: str
    state_dir: str
    log_dir: str
    service_manager: str
    cache_device: str
    cache: CacheServer
    engine: Engine


def deployment_from_values(values: Mapping[str, Value]) -> Deployment:
    """Builds the typed views and checks what spans several settings.

    Args:
        values: typed values by variable, as ``settings.validate`` returns them.

    Raises:
        UsageError: one line with every contradiction found.
    """
    own: Mapping[str, Any] = values  # already typed, by the declaration of each setting
    shared = {"launch_mode": own["kvp_launch_mode"], "device": own["kvp_device"]}
    cache = CacheServer(
        venv=own["cache_server_venv"],
        image=own["cache_server_image"],
        host=own["kvp_cache_host"],
        port=own["kvp_cache_port"],
        http_port=own["kvp_cache_http_port"],
        chunk_size=own["kvp_chunk_size"],
        l1_size_gb=own["cache_server_l1_size_gb"],
        l2_backend=own["cache_server_l2_backend"],
        root=own["kvp_cache_root"],
        budget_gb=own["kvp_cache_budget_gb"],
        min_free_gb=own["kvp_cache_min_free_gb"],
        evict_trigger_watermark=own["cache_server_evict_trigger_watermark"],
        evict_ratio=own["cache_server_evict_ratio"],
        codec=own["kvp_codec"],
        log_level=own["cache_server_log_level"],
        runtime_dir=f"{own['kvp_home']}/runtime",
        **shared,
    )
    engine = Engine(
        variant=own["vllm_engine_variant"],
        venv=own["vllm_engine_venv"],
        image=own["vllm_engine_image"],
        model_dir=own["kvp_model_dir"],
        model_id=own["kvp_model_id"],
        model_revision=own["kvp_model_revision"],
        model_family=own["kvp_model_family"],
        models_dir=own["kvp_models_dir"],
        served_model_name=own["vllm_engine_served_model_name"] or own["kvp_model_id"],
        host=own["vllm_engine_host"],
        port=own["vllm_engine_port"],
        tensor_parallel_size=own["vllm_engine_tensor_parallel_size"],
        max_num_seqs=own["vllm_engine_max_num_seqs"],
        max_model_len=own["vllm_engine_max_model_len"],
        kv_cache_dtype=own["vllm_engine_kv_cache_dtype"],
        block_size=own["vllm_engine_block_size"],
        enforce_eager=own["vllm_engine_enforce_eager"],
        gpu_memory_utilization=own["vllm_engine_gpu_memory_utilization"],
        cpu_kvcache_space_gb=own["vllm_engine_cpu_kvcache_space_gb"],
        cpu_offload_gb=own["vllm_engine_cpu_offload_gb"],
        extra_args=_split(own["vllm_engine_extra_args"]),
        kv_persist=own["vllm_engine_kv_persist"],
        namespace_override=own["vllm_engine_namespace"],
        cache_host=own["kvp_cache_host"],
        cache_port=own["kvp_cache_port"],
        **shared,
    )
    problems = [*_cache_problems(cache), *_engine_problems(engine, cache)]
    if problems:
        raise UsageError("checking the settings", "; ".join(problems), "Correct these variables in the inventory.")
    return Deployment(
        home=own["kvp_home"],
        config_dir=own["kvp_config_dir"],
        state_dir=own["kvp_state_dir"],
        log_dir=own["kvp_log_dir"],
        service_manager=own["kvp_service_manager"],
        cache_device=own["kvp_cache_device"],
        cache=cache,
        engine=engine,
    )


def _cache_problems(cache: CacheServer) -> list[str]:
    problems = []
    codecs = BACKENDS[cache.l2_backend].codecs
    if any(cache.codec.startswith(lossy) for lossy in LOSSY_CODECS):
        problems.append(f"LMCACHE_L2_SERDE={cache.codec} is LOSSY and is not supported (kvp_codec)")
    elif cache.codec not in codecs:
        problems.append(
            f"LMCACHE_L2_SERDE={cache.codec} is not a codec of {cache.l2_backend}, which has "
            f"{', '.join(codecs)} (kvp_codec)"
        )
    if cache.host not in _LOOPBACK:
        problems.append(f"kvp_cache_host {cache.host} is not loopback; KV is derived from prompts and is not encrypted")
    if cache.l2_backend == "nixl_store_dynamic" and cache.l1_size_gb * 1024**3 % _L1_PAGE:
        problems.append(
            f"cache_server_l1_size_gb {to_text(cache.l1_size_gb)} is not a whole number of pages of {_L1_PAGE} bytes "
            "(as GiB), which nixl_store_dynamic needs; a whole number of GiB is"
        )
    if cache.port == cache.http_port:
        problems.append(f"kvp_cache_port and kvp_cache_http_port are both {cache.port}")
    if cache.launch_mode == "docker":
        problems.extend(_image_problems("cache_server_image", cache.image))
    elif not cache.venv:
        problems.append("cache_server_venv is empty, and launch mode host needs it")
    return problems


def _engine_problems(engine: Engine, cache: CacheServer) -> list[str]:
    problems = []
    if engine.port in (cache.port, cache.http_port):
        problems.append(f"vllm_engine_port {engine.port} is also a port of the cache server")
    if cache.chunk_size % engine.block_size:
        problems.append(
            f"kvp_chunk_size {cache.chunk_size} is not a multiple of vllm_engine_block_size {engine.block_size}"
        )
    if engine.device == "cpu" and engine.kv_persist and engine.block_size % 32:
        problems.append(f"vllm_engine_block_size {engine.block_size} is not a multiple of 32, which device cpu needs")
    if engine.model_revision and not re.match(r"[0-9a-f]{40}\Z", engine.model_revision):
        problems.append(
            f"KVP_MODEL_REVISION must be a full 40-hex SHA, not {engine.model_revision!r} (kvp_model_revision)"
        )
    if engine.variant == "uva" and engine.device == "cpu":
        problems.append("vllm_engine_variant uva needs kvp_device cuda")
    if engine.variant == "uva" and engine.cpu_offload_gb <= 0:
        problems.append("vllm_engine_variant uva offloads nothing while vllm_engine_cpu_offload_gb is 0")
    if BACKENDS[cache.l2_backend].has_slots and any(
        name.startswith("--spec") for name in parse_options(engine.extra_args)
    ):
        problems.append(
            f"{cache.l2_backend} needs the size of an object beforehand, which speculative decoding changes in a way "
            "that config.json does not tell; take another cache_server_l2_backend"
        )
    if engine.launch_mode == "docker":
        problems.extend(_image_problems("vllm_engine_image", engine.image))
    elif not engine.venv:
        problems.append("vllm_engine_venv is empty, and launch mode host needs it")
    return problems


def _image_problems(variable: str, image: str) -> list[str]:
    if not image:
        return [f"{variable} is empty, and launch mode docker needs it"]
    if not _PINNED_IMAGE.match(image):
        return [f"{variable} {image!r} is a floating tag; pin it as name@sha256:<64 hex>"]
    return []


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError("reading vllm_engine_extra_args", str(error), "Quote the arguments as for a shell.") from None
