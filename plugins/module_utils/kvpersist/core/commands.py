"""Command lines of cache server and engine, for host and Docker, CUDA and CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .deployment import CacheServer, Engine
from .errors import UsageError
from .l2_backends import BACKENDS, Tier, adapter_config
from .settings import to_text

# LMCache's own connector; vLLM's copy calls torch.cuda and lags behind the server's protocol.
CONNECTOR = "LMCacheMPConnector"
CONNECTOR_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
HASH_ALGORITHM = "blake3"
SEPARATE_OBJECT_GROUPS = False
CACHE_CONTAINER = "kvp-lmcache-server"
ENGINE_MODULE = "vllm.entrypoints.openai.api_server"
CACHE_MODULE = "lmcache.cli.main"

# Neither program phones home, and the engine never asks a model hub: the model is a local folder.
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}
_ENGINE_QUIET = {**_QUIET, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def l2_adapter_config(cache: CacheServer) -> dict[str, Any]:
    """JSON of ``--l2-adapter``."""
    return adapter_config(cache.l2_backend, tier_of(cache))


def tier_of(cache: CacheServer) -> Tier:
    """What is asked of the L2 tier. Budgets in GB become bytes here, exactly."""
    return Tier(
        root=cache.root,
        capacity_bytes=round(cache.budget_gb * 1e9),
        min_free_bytes=round(cache.min_free_gb * 1e9),
        codec=cache.codec,
        trigger_watermark=cache.evict_trigger_watermark,
        eviction_ratio=cache.evict_ratio,
        object_bytes=cache.object_bytes,
    )


def cache_arguments(cache: CacheServer) -> list[str]:
    """Arguments of ``lmcache server``."""
    return [
        "server",
        *("--host", cache.host),
        *("--port", str(cache.port)),
        *("--http-host", "127.0.0.1"),
        *("--http-port", str(cache.http_port)),
        *("--chunk-size", str(cache.chunk_size)),
        *("--hash-algorithm", HASH_ALGORITHM),
        *(("--separate-object-groups",) if SEPARATE_OBJECT_GROUPS else ()),
        # A CPU engine moves KV itself ("engine driven"), which the server's default mode refuses without saying so.
        *("--supported-transfer-mode", "auto" if cache.device == "cpu" else "lmcache_driven"),
        *("--l1-size-gb", to_text(cache.l1_size_gb)),
        *("--eviction-policy", "LRU"),
        *("--l2-adapter", _json(l2_adapter_config(cache))),
    ]


def cache_environment(cache: CacheServer) -> dict[str, str]:
    """Environment variables of the cache server."""
    environment = {**_QUIET, "LMCACHE_LOG_LEVEL": cache.log_level}
    if BACKENDS[cache.l2_backend].needs_runtime:
        environment["PYTHONPATH"] = cache.runtime_dir
    return environment


def cache_argv(cache: CacheServer) -> list[str]:
    """The whole command of the cache server: the program itself, or ``docker run``."""
    if cache.launch_mode == "host":
        return [f"{cache.venv}/bin/python", "-m", CACHE_MODULE, *cache_arguments(cache)]
    needs_runtime = BACKENDS[cache.l2_backend].needs_runtime
    return [
        *_docker_run(CACHE_CONTAINER, cache.device, cache_environment(cache)),
        *("--volume", f"{cache.root}:{cache.root}"),
        *(("--volume", f"{cache.runtime_dir}:{cache.runtime_dir}:ro") if needs_runtime else ()),
        *("--entrypoint", "lmcache", cache.image),
        *cache_arguments(cache),
    ]


def connector_config(engine: Engine) -> dict[str, Any]:
    """JSON of ``--kv-transfer-config``.

    KV that cannot be loaded is recomputed; vLLM's default would fail the request.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{engine.cache_host}",
            "lmcache.mp.port": engine.cache_port,
        },
    }


def engine_arguments(engine: Engine, model: str) -> list[str]:
    """Arguments of vLLM's API server.

    Args:
        engine: its settings; ``kv_persist`` decides whether the cache is attached.
        model: the value of ``--model``: the path that ends in the namespace when the cache is attached.
    """
    arguments = [
        *("--model", model),
        *("--served-model-name", engine.served_model_name),
        *("--host", engine.host),
        *("--port", str(engine.port)),
        *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--max-model-len", str(engine.max_model_len)),
        *("--kv-cache-dtype", engine.kv_cache_dtype),
    ]
    if engine.device == "cuda":
        arguments += ["--gpu-memory-utilization", to_text(engine.gpu_memory_utilization)]
    if engine.enforce_eager:
        arguments.append("--enforce-eager")
    if engine.variant == "uva":
        arguments += ["--offload-backend", "uva", "--cpu-offload-gb", to_text(engine.cpu_offload_gb)]
    if engine.kv_persist:
        arguments += [
            *("--kv-transfer-config", _json(connector_config(engine))),
            "--enable-prompt-tokens-details",
            *("--block-size", str(engine.block_size)),
        ]
    return [*arguments, *engine.extra_args]


def engine_environment(engine: Engine) -> dict[str, str]:
    """Environment variables of the engine."""
    environment = dict(_ENGINE_QUIET)
    if engine.device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = to_text(engine.cpu_kvcache_space_gb)
        if engine.tensor_parallel_size > 1:
            # Ranks that bind to cores of their own starve each other on a small machine.
            environment.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    if engine.variant == "uva":
        # Pinning rounds each tensor up to a power of two; the exact-size path needs no more than the weights.
        environment["VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"] = "1"
    return environment


def engine_argv(engine: Engine, namespace: str | None) -> list[str]:
    """The whole command of the engine: the program itself, or ``docker run``.

    Args:
        engine: its settings.
        namespace: the namespace under which the model is served; None exactly when the cache is not attached.

    Raises:
        UsageError: when the two disagree.
    """
    if (namespace is not None) != engine.kv_persist:
        raise UsageError(
            "building the engine's command",
            "namespace and KV_PERSIST disagree",
            "Give a namespace exactly when KV_PERSIST=1.",
        )
    model = served_path(engine, namespace)
    if engine.launch_mode == "host":
        return [f"{engine.venv}/bin/python", "-m", ENGINE_MODULE, *engine_arguments(engine, model)]
    return [
        *_docker_run(engine.container, engine.device, engine_environment(engine)),
        *("--volume", f"{engine.model_dir}:{model}:ro"),
        *("--entrypoint", "python3", engine.image),
        *("-m", ENGINE_MODULE),
        *engine_arguments(engine, model),
    ]


def served_path(engine: Engine, namespace: str | None) -> str:
    """The value of ``--model``."""
    if namespace is not None:
        return f"{engine.models_dir.rstrip('/')}/{engine.model_family}/{namespace}"
    return engine.model_dir if engine.launch_mode == "host" else "/model"


def confirmation(engine: Engine, namespace: str) -> tuple[str, str]:
    """The two lines that a launcher prints when it attaches the cache."""
    cache = f"{engine.cache_host}:{engine.cache_port}"
    return (
        f"KV_PERSIST=1: attaching LMCache connector {CONNECTOR} ({CONNECTOR_MODULE}) to {cache}",
        f"KV_PERSIST=1: cache-identity namespace -> {served_path(engine, namespace)}",
    )


def _docker_run(name: str, device: str, environment: Mapping[str, str]) -> list[str]:
    return [
        *("docker", "run", "--rm", "--name", name),
        *("--network", "host"),
        # Engine and cache hand GPU memory to each other through CUDA IPC, which needs one IPC namespace.
        *("--ipc", "host"),
        *(("--gpus", "all") if device == "cuda" else ()),
        *("--ulimit", "memlock=-1"),
        *("--security-opt", "no-new-privileges"),
        *(word for key, value in sorted(environment.items()) for word in ("--env", f"{key}={value}")),
    ]


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
