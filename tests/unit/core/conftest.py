"""Builders that every test of core starts from."""

from __future__ import annotations

from typing import Any, Callable

import pytest
from hypothesis import settings as hypothesis_settings
from kvpersist.core.deployment import Deployment, deployment_from_values
from kvpersist.core.identity import Identity
from kvpersist.core.settings import Value, validate

# The machine that runs these may be busy with real services: how long one example takes proves nothing.
hypothesis_settings.register_profile("kvpersist-core", deadline=None)
hypothesis_settings.load_profile("kvpersist-core")

ENGINE_IMAGE = "registry.example/vllm@sha256:" + "a" * 64
CACHE_IMAGE = "registry.example/lmcache@sha256:" + "b" * 64

# The least that an inventory must say.
MODEL = {"kvp_model_dir": "/data/llama", "kvp_model_id": "org/Llama", "kvp_model_family": "llama"}
MODES: dict[str, dict[str, Any]] = {
    "host": {"kvp_launch_mode": "host"},
    "docker": {"kvp_launch_mode": "docker", "vllm_engine_image": ENGINE_IMAGE, "cache_server_image": CACHE_IMAGE},
}
DEVICES: dict[str, dict[str, Any]] = {
    "cuda": {"kvp_device": "cuda"},
    "cpu": {"kvp_device": "cpu", "vllm_engine_block_size": 32, "vllm_engine_tensor_parallel_size": 1},
}

IDENTITY: dict[str, Any] = {
    "model_id": "org/Modèle 7B",
    "model_revision": "0123456789abcdef0123456789abcdef01234567",
    "weights_sha256": "1" * 64,
    "tokenizer_name": "org/tokenizer",
    "tokenizer_revision": "2" * 40,
    "tokenizer_sha256": "3" * 64,
    "chat_template_sha256": "4" * 64,
    "model_config_sha256": "5" * 64,
    "model_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "kv_cache_scales": "none",
    "kv_geometry": "32*full(heads=8,k=128,v=128)",
    "rope": '{"rope_theta":500000.0}',
    "hf_overrides": "none",
    "quantization": "none",
    "block_size": 16,
    "chunk_size": 256,
    "max_model_len": 131072,
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "attention_backend": "none",
    "speculative_config": "none",
    "enforce_eager": False,
    "engine_flags": "none",
    "object_groups": False,
    "hash_algorithm": "blake3",
    "device": "cuda",
    "engine_build": "vllm 0.32.0",
    "lmcache_version": "0.5.6",
    "connector": "lmcache.integration.vllm.lmcache_mp_connector",
    "codec": "none",
    "l2_format": "raw",
}


@pytest.fixture
def values() -> Callable[..., dict[str, Value]]:
    """Typed values of a deployment in launch mode host on CUDA, with some replaced."""

    def build(mode: str = "host", device: str = "cuda", **overrides: Any) -> dict[str, Value]:
        return validate({**MODEL, **MODES[mode], **DEVICES[device], **overrides}, "testing")

    return build


@pytest.fixture
def deploy(values: Callable[..., dict[str, Value]]) -> Callable[..., Deployment]:
    """A deployment in launch mode host on CUDA, with some values replaced."""

    def build(mode: str = "host", device: str = "cuda", **overrides: Any) -> Deployment:
        return deployment_from_values(values(mode, device, **overrides))

    return build


@pytest.fixture
def identity() -> Callable[..., Identity]:
    """A complete identity, with some fields replaced."""

    def build(**overrides: Any) -> Identity:
        return Identity(**{**IDENTITY, **overrides})

    return build
