"""Command lines of cache server and engine in every mode."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core.commands import (
    cache_arguments,
    cache_argv,
    cache_environment,
    confirmation,
    connector_config,
    engine_arguments,
    engine_argv,
    engine_environment,
    l2_adapter_config,
    served_path,
)
from kvpersist.core.deployment import CacheServer, Deployment, deployment_from_values
from kvpersist.core.engine_args import HARMLESS, OWNED, parse_options
from kvpersist.core.errors import UsageError
from kvpersist.core.identity import model_path
from kvpersist.core.l2_backends import BACKENDS, backend_of, codec_of
from kvpersist.core.settings import validate

Deploy = Callable[..., Deployment]
NAMESPACE = "kvp-" + "0" * 32
SERVED = f"/models/llama/{NAMESPACE}"
ENGINE_IMAGE = "registry.example/vllm@sha256:" + "a" * 64
CACHE_IMAGE = "registry.example/lmcache@sha256:" + "b" * 64
UVA = {"vllm_engine_variant": "uva", "vllm_engine_cpu_offload_gb": 40}

every_mode = pytest.mark.parametrize("mode", ["host", "docker"])
every_device = pytest.mark.parametrize("device", ["cuda", "cpu"])
every_attachment = pytest.mark.parametrize("kv_persist", [True, False], ids=["attached", "bare"])


def engine_command(deployment: Deployment) -> list[str]:
    return engine_argv(deployment.engine, NAMESPACE if deployment.engine.kv_persist else None)


def single(argv: list[str], option: str) -> str:
    """The one value of an option."""
    (value,) = parse_options(argv)[option]
    return value


def sized(cache: CacheServer, object_bytes: int = 1_000_000) -> CacheServer:
    """As the host completes it for a backend with slots."""
    return dataclasses.replace(cache, object_bytes=object_bytes)


def test_engine_on_the_host_with_cuda_and_cache(deploy: Deploy) -> None:
    argv = engine_argv(deploy().engine, NAMESPACE)
    connector = json.dumps(connector_config(deploy().engine), separators=(",", ":"))
    assert argv == [
        *("/opt/kvpersist/engine/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", SERVED, "--served-model-name", "org/Llama"),
        *("--host", "127.0.0.1", "--port", "8000"),
        *("--tensor-parallel-size", "4", "--max-num-seqs", "2", "--max-model-len", "1048576"),
        *("--kv-cache-dtype", "auto", "--gpu-memory-utilization", "0.9"),
        *("--kv-transfer-config", connector, "--enable-prompt-tokens-details", "--block-size", "16"),
    ]


def test_engine_on_the_host_with_cpu_and_without_cache(deploy: Deploy) -> None:
    assert engine_argv(deploy(device="cpu", vllm_engine_kv_persist=False).engine, None) == [
        *("/opt/kvpersist/engine/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/data/llama", "--served-model-name", "org/Llama"),
        *("--host", "127.0.0.1", "--port", "8000"),
        *("--tensor-parallel-size", "1", "--max-num-seqs", "2", "--max-model-len", "1048576"),
        *("--kv-cache-dtype", "auto"),
    ]


def test_engine_in_docker(deploy: Deploy) -> None:
    engine = deploy("docker", **UVA, vllm_engine_enforce_eager=True).engine
    argv = engine_argv(engine, NAMESPACE)
    entry = argv.index("--entrypoint")
    assert argv[:entry] == [
        *("docker", "run", "--rm", "--name", "llama-tp4-kvp", "--network", "host", "--ipc", "host", "--gpus", "all"),
        *("--ulimit", "memlock=-1", "--security-opt", "no-new-privileges"),
        *("--env", "DO_NOT_TRACK=1", "--env", "HF_HUB_OFFLINE=1"),
        *("--env", "LMCACHE_DISABLE_BANNER=1", "--env", "LMCACHE_TRACK_USAGE=false"),
        *("--env", "VLLM_NO_USAGE_STATS=1", "--env", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1"),
        *("--volume", f"/data/llama:{SERVED}:ro"),
    ]
    assert argv[entry:] == [
        *("--entrypoint", "python3", ENGINE_IMAGE, "-m", "vllm.entrypoints.openai.api_server"),
        *engine_arguments(engine, SERVED),
    ]


def test_cache_server_on_the_host(deploy: Deploy) -> None:
    cache = deploy(cache_server_venv="/opt/lmc").cache
    assert cache_argv(cache)[:3] == ["/opt/lmc/bin/python", "-m", "lmcache.cli.main"]
    assert cache_argv(cache)[3:] == [
        *("server", "--host", "127.0.0.1", "--port", "5555", "--http-host", "127.0.0.1", "--http-port", "8080"),
        *("--chunk-size", "256", "--hash-algorithm", "blake3", "--supported-transfer-mode", "lmcache_driven"),
        *("--l1-size-gb", "64", "--eviction-policy", "LRU"),
        *("--l2-adapter", json.dumps(l2_adapter_config(cache), separators=(",", ":"))),
    ]


def test_cache_server_in_docker(deploy: Deploy) -> None:
    cache = deploy("docker", cache_server_log_level="DEBUG").cache
    argv = cache_argv(cache)
    entry = argv.index("--entrypoint")
    assert argv[:entry] == [
        *("docker", "run", "--rm", "--name", "kvp-lmcache-server", "--network", "host", "--ipc", "host"),
        *("--gpus", "all", "--ulimit", "memlock=-1", "--security-opt", "no-new-privileges"),
        *("--env", "DO_NOT_TRACK=1", "--env", "LMCACHE_DISABLE_BANNER=1"),
        *("--env", "LMCACHE_LOG_LEVEL=DEBUG", "--env", "LMCACHE_TRACK_USAGE=false"),
        *("--env", "PYTHONPATH=/opt/kvpersist/runtime"),
        *("--volume", "/var/lib/kv-persistence/l2:/var/lib/kv-persistence/l2"),
        *("--volume", "/opt/kvpersist/runtime:/opt/kvpersist/runtime:ro"),
    ]
    assert argv[entry:] == ["--entrypoint", "lmcache", CACHE_IMAGE, *cache_arguments(cache)]


@every_attachment
@every_device
@every_mode
@pytest.mark.parametrize("variant", ["persist", "uva"])
def test_a_cache_that_is_not_attached_leaves_no_trace(
    mode: str, device: str, variant: str, kv_persist: bool, deploy: Deploy
) -> None:
    if variant == "uva" and device == "cpu":
        with pytest.raises(UsageError, match="vllm_engine_variant uva needs kvp_device cuda"):
            deploy(mode, device, **UVA)
        return
    extra = {**(UVA if variant == "uva" else {}), "vllm_engine_kv_persist": kv_persist}
    argv = engine_command(deploy(mode, device, **extra))
    options = parse_options(argv)
    attached = {"--kv-transfer-config", "--enable-prompt-tokens-details", "--block-size"}
    assert set(options) & attached == (attached if kv_persist else set())
    assert (NAMESPACE in " ".join(argv)) == kv_persist
    assert ("LMCacheMPConnector" in " ".join(argv)) == kv_persist
    offload = {"--offload-backend": ["uva"], "--cpu-offload-gb": ["40"]} if variant == "uva" else {}
    assert {name: options[name] for name in ("--offload-backend", "--cpu-offload-gb") if name in options} == offload
    if mode == "docker":
        target = SERVED if kv_persist else "/model"
        assert options["--volume"] == [f"/data/llama:{target}:ro"]
        assert options["--model"] == [target]
    else:
        assert options["--model"] == [SERVED if kv_persist else "/data/llama"]


@pytest.mark.parametrize("variant", [{}, UVA], ids=["persist", "uva"])
@every_mode
def test_attaching_only_adds_to_the_command_line(mode: str, variant: dict[str, Any], deploy: Deploy) -> None:
    """Rollback is one variable: without it the command is what it always was."""
    bare = engine_command(deploy(mode, vllm_engine_kv_persist=False, **variant))
    attached = engine_command(deploy(mode, **variant))
    added = attached.index("--kv-transfer-config")
    rest = [*attached[:added], *attached[added + 5 :]]
    plain = "/data/llama" if mode == "host" else "/model"
    assert [word.replace(SERVED, plain) for word in rest] == bare


@every_mode
@every_device
def test_nothing_runs_privileged_and_containers_get_gpus_only_with_cuda(mode: str, device: str, deploy: Deploy) -> None:
    deployment = deploy(mode, device)
    for argv in (cache_argv(deployment.cache), engine_command(deployment)):
        assert not [word for word in argv if "privileged" in word and word != "no-new-privileges"]
        assert "--cap-add" not in argv
        assert ("--gpus" in argv) == (mode == "docker" and device == "cuda")
        assert ("docker" in argv) == (mode == "docker")
        assert all(isinstance(word, str) and word for word in argv)


def test_images_are_run_by_digest(deploy: Deploy) -> None:
    deployment = deploy("docker")
    assert [word for word in engine_command(deployment) if "@sha256:" in word] == [ENGINE_IMAGE]
    assert [word for word in cache_argv(deployment.cache) if "@sha256:" in word] == [CACHE_IMAGE]


@every_mode
def test_a_port_set_once_appears_on_both_sides(mode: str, deploy: Deploy) -> None:
    deployment = deploy(mode, kvp_cache_port=5777, kvp_cache_http_port=8181, kvp_cache_host="localhost")
    server = cache_argv(deployment.cache)
    assert (single(server, "--host"), single(server, "--port")) == ("localhost", "5777")
    assert (single(server, "--http-host"), single(server, "--http-port")) == ("127.0.0.1", "8181")
    connector = json.loads(single(engine_command(deployment), "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"] == {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 5777}
    assert deployment.cache.http_url == "http://127.0.0.1:8181"


def test_the_connector_is_lmcache_s_own_and_recomputes_what_it_cannot_load(deploy: Deploy) -> None:
    assert connector_config(deploy().engine) == {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5555},
    }


@every_mode
@every_device
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_the_disk_tier_always_evicts(mode: str, device: str, backend: str, deploy: Deploy) -> None:
    deployment = deploy(
        mode,
        device,
        cache_server_l2_backend=backend,
        cache_server_evict_trigger_watermark=0.8,
        cache_server_evict_ratio=0.2,
    )
    adapter = json.loads(single(cache_argv(sized(deployment.cache)), "--l2-adapter"))
    assert adapter["eviction"] == {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2}


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_backend_is_recognised_by_its_own_json(backend: str, deploy: Deploy) -> None:
    config = l2_adapter_config(sized(deploy(cache_server_l2_backend=backend).cache))
    assert backend_of(config) is BACKENDS[backend]
    assert codec_of(config) == "none"


def test_a_plugin_of_somebody_else_is_not_taken_for_ours() -> None:
    assert backend_of({"type": "plugin", "module_path": "other.adapter", "class_name": "KvPersistL2Adapter"}) is None
    assert codec_of({"type": "fs_native", "serde": {"type": "fp8"}}) != "none"


def test_the_projects_own_disk_tier(deploy: Deploy) -> None:
    cache = deploy(kvp_cache_root="/nvme/l2", kvp_codec="zstd", kvp_cache_budget_gb=2, kvp_cache_min_free_gb=0.5).cache
    adapter = l2_adapter_config(cache)
    assert (adapter["type"], adapter["module_path"]) == ("plugin", "kvpersist_l2.adapter")
    assert adapter["adapter_params"] == {
        "root": "/nvme/l2",
        "capacity_bytes": 2_000_000_000,
        "min_free_bytes": 500_000_000,
        "codec": "zstd",
    }


LMCACHES = {
    "fs_native": {"type": "fs_native", "base_path": "/nvme/l2", "max_capacity_gb": 2.0},
    "nixl_store_dynamic": {
        "type": "nixl_store_dynamic",
        "backend": "POSIX",
        "backend_params": {"file_path": "/nvme/l2", "use_direct_io": "false", "max_capacity_gb": "2.0"},
    },
    "fs": {"type": "fs", "base_path": "/nvme/l2"},
    "raw_block": {
        "type": "raw_block",
        "device_path": "/nvme/l2/raw-block.data",
        "capacity_bytes": 2 * 1024**3,
        "slot_bytes": 245 * 4096 + 4096,  # whole pages for the object, one for its header
        "meta_total_bytes": 8 * 1024**2,  # 2,131 slots, two KiB of index for each, up to the next power of two
        "meta_checkpoint_interval_sec": 10,
    },
}


@pytest.mark.parametrize("backend", LMCACHES)
def test_lmcaches_own_disk_tiers_get_all_they_need_and_no_packages_of_ours(backend: str, deploy: Deploy) -> None:
    settings = {"kvp_cache_root": "/nvme/l2", "kvp_cache_budget_gb": 2.147483648}
    cache = sized(deploy(cache_server_l2_backend=backend, **settings).cache)
    adapter = l2_adapter_config(cache)
    assert adapter.pop("eviction")
    assert adapter == LMCACHES[backend]
    assert "PYTHONPATH" not in cache_environment(cache)
    assert sorted(LMCACHES) == sorted(set(BACKENDS) - {"kvpersist"})


@given(st.integers(1, 1_500_000), st.integers(1, 1 << 27))
def test_slots_and_index_of_raw_block_fit_its_file_or_the_budget_is_refused(megabytes: int, object_bytes: int) -> None:
    settings = {"kvp_model_dir": "/m", "kvp_model_id": "m", "kvp_model_family": "m", "kvp_launch_mode": "host"}
    values = {**settings, "kvp_cache_budget_gb": megabytes / 1000, "cache_server_l2_backend": "raw_block"}
    cache = sized(deployment_from_values(validate(values, "testing")).cache, object_bytes)
    if megabytes * 1_000_000 // 4096 < 256 + -(-object_bytes // 4096) + 1:  # pages: least index, object, its header
        with pytest.raises(UsageError, match=r"holds no object of .* Raise kvp_cache_budget_gb"):
            l2_adapter_config(cache)
        return
    adapter = l2_adapter_config(cache)
    slot, index, size = adapter["slot_bytes"], adapter["meta_total_bytes"], adapter["capacity_bytes"]
    assert [value % 4096 for value in (slot, index, size)] == [0, 0, 0]
    assert object_bytes + 4096 <= slot < object_bytes + 3 * 4096
    assert megabytes * 1_000_000 - 4096 < size <= megabytes * 1_000_000
    slots = (size - index) // slot
    assert slots >= 1
    assert slots * 1024 <= index // 2 - 4096, "half of it holds one copy of the index, behind a header page"


# fs reads no capacity, raw_block takes whole pages of it.
WITH_BYTES = ("kvpersist", "fs_native", "nixl_store_dynamic")


def capacity(adapter: dict[str, Any]) -> int:
    """Bytes as the adapter reads them."""
    if "adapter_params" in adapter:
        return adapter["adapter_params"]["capacity_bytes"]
    return int(float(adapter.get("backend_params", adapter)["max_capacity_gb"]) * 1024**3)


@given(st.integers(1, 100_000_000))
def test_the_budget_arrives_to_the_byte(thousandths: int) -> None:
    """As LMCache reads it (0.5.6): ``int(max_capacity_gb * 1024**3)``."""
    settings = {"kvp_model_dir": "/m", "kvp_model_id": "m", "kvp_model_family": "m", "kvp_launch_mode": "host"}
    budget = f"{thousandths // 1000}.{thousandths % 1000:03}"
    for backend in WITH_BYTES:
        values = {**settings, "kvp_cache_budget_gb": budget, "cache_server_l2_backend": backend}
        cache = deployment_from_values(validate(values, "testing")).cache
        assert capacity(json.loads(single(cache_argv(cache), "--l2-adapter"))) == thousandths * 1_000_000


@pytest.mark.parametrize("budget", [1.001, 4.35, 1500.0, 0.001, 2.007])
def test_the_budget_arrives_to_the_byte_where_a_product_of_floats_falls_short(budget: float, deploy: Deploy) -> None:
    for backend in WITH_BYTES:
        cache = deploy(kvp_cache_budget_gb=budget, cache_server_l2_backend=backend).cache
        assert capacity(l2_adapter_config(cache)) == round(budget * 1000) * 1_000_000


def test_a_cpu_engine_may_drive_the_transfer_itself(deploy: Deploy) -> None:
    assert single(cache_argv(deploy(device="cpu").cache), "--supported-transfer-mode") == "auto"
    assert single(cache_argv(deploy(device="cuda").cache), "--supported-transfer-mode") == "lmcache_driven"


def test_each_setting_of_the_engine_reaches_its_argument(deploy: Deploy) -> None:
    engine = deploy(
        vllm_engine_served_model_name="chat",
        vllm_engine_host="0.0.0.0",  # noqa: S104
        vllm_engine_port=8100,
        vllm_engine_tensor_parallel_size=2,
        vllm_engine_max_num_seqs=3,
        vllm_engine_max_model_len=4096,
        vllm_engine_kv_cache_dtype="fp8",
        vllm_engine_block_size=64,
        vllm_engine_gpu_memory_utilization=0.85,
        vllm_engine_enforce_eager=True,
        vllm_engine_extra_args='--seed 3 --hf-overrides \'{"a": "b c"}\'',
    ).engine
    argv = engine_argv(engine, NAMESPACE)
    for option, value in {
        "--served-model-name": "chat",
        "--host": "0.0.0.0",  # noqa: S104
        "--port": "8100",
        "--tensor-parallel-size": "2",
        "--max-num-seqs": "3",
        "--max-model-len": "4096",
        "--kv-cache-dtype": "fp8",
        "--block-size": "64",
        "--gpu-memory-utilization": "0.85",
        "--enforce-eager": "",
        "--seed": "3",
        "--hf-overrides": '{"a": "b c"}',
    }.items():
        assert single(argv, option) == value
    assert argv[-4:] == ["--seed", "3", "--hf-overrides", '{"a": "b c"}']


@every_device
def test_every_argument_we_build_is_known_as_ours(device: str, deploy: Deploy) -> None:
    """Otherwise extra arguments could contradict it, or it would count as a flag of its own in the identity."""
    variant = UVA if device == "cuda" else {}
    engine = deploy(device=device, vllm_engine_enforce_eager=True, **variant).engine
    assert set(parse_options(engine_arguments(engine, SERVED))) - OWNED - HARMLESS == set()


@pytest.mark.parametrize(("kv_persist", "namespace"), [(True, None), (False, NAMESPACE)])
def test_namespace_and_attachment_must_agree(kv_persist: bool, namespace: str | None, deploy: Deploy) -> None:
    with pytest.raises(UsageError, match="namespace and KV_PERSIST disagree"):
        engine_argv(deploy(vllm_engine_kv_persist=kv_persist).engine, namespace)


@every_mode
@pytest.mark.parametrize("models_dir", ["/models", "/models/", "/", "/a/b//"])
def test_the_model_is_served_under_the_path_that_was_checked(mode: str, models_dir: str, deploy: Deploy) -> None:
    deployment = deploy(mode, kvp_models_dir=models_dir)
    checked = model_path(models_dir, "llama", NAMESPACE, BACKENDS["fs_native"].longest_model_path)
    assert served_path(deployment.engine, NAMESPACE) == checked
    assert single(engine_command(deployment), "--model") == checked
    assert "//" not in checked


def test_the_confirmation_lines(deploy: Deploy) -> None:
    attached, namespace = confirmation(deploy(kvp_cache_port=5777).engine, NAMESPACE)
    assert attached.startswith("KV_PERSIST=1: attaching LMCache connector")
    assert "127.0.0.1:5777" in attached
    assert namespace == f"KV_PERSIST=1: cache-identity namespace -> {SERVED}"


@every_device
@every_mode
def test_neither_program_phones_home(mode: str, device: str, deploy: Deploy) -> None:
    deployment = deploy(mode, device)
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}
    assert quiet.items() <= cache_environment(deployment.cache).items()
    engine = {**quiet, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    assert engine.items() <= engine_environment(deployment.engine).items()


@pytest.mark.parametrize(
    ("device", "overrides", "expected"),
    [
        ("cuda", {}, {}),
        ("cuda", UVA, {"VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"}),
        ("cpu", {"vllm_engine_cpu_kvcache_space_gb": 2}, {"VLLM_CPU_KVCACHE_SPACE": "2"}),
        (
            "cpu",
            {"vllm_engine_tensor_parallel_size": 2},
            {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        ),
    ],
)
def test_the_engine_s_environment(
    device: str, overrides: dict[str, Any], expected: dict[str, str], deploy: Deploy
) -> None:
    environment = engine_environment(deploy(device=device, **overrides).engine)
    always = {"LMCACHE_TRACK_USAGE", "LMCACHE_DISABLE_BANNER", "DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"}
    assert {name: value for name, value in environment.items() if name not in always} == expected
