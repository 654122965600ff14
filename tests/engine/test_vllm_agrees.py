"""The installed vLLM and transformers read the same from each configuration as this project does."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kvpersist.core.geometry import geometry_from_config, language_model_type
from kvpersist.core.identity import resolve_kv_cache_dtype
from kvpersist.core.model_types import DEFAULTS, MLA_TYPES
from kvpersist.core.resolve import context_limit, kv_quantization, kv_scheme, model_dtype
from transformers import CONFIG_MAPPING
from vllm.config.model import ModelConfig, _get_and_verify_dtype, _get_and_verify_max_len
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

CONFIGS = Path(__file__).parents[1] / "unit" / "core" / "fixtures" / "configs"
HYBRIDS = {"falcon-mamba-7b", "jamba-v0.1", "llama-3.2-11b-vision", "nemotron-h-8b", "qwen3-next-80b-a3b"}
NAMES = sorted({path.stem for path in CONFIGS.glob("*.json")} - HYBRIDS)
VLLM_KINDS = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
# vLLM reads these two with DeepSeek-V3's class, whatever transformers has under their names.
READ_AS = {"deepseek_v32": "deepseek_v3", "kimi_k2": "deepseek_v3"}


@dataclasses.dataclass(frozen=True)
class Read:
    """A configuration as vLLM and as this project read it."""

    config: dict[str, Any]
    hf: Any
    text: Any
    arch: Any


@pytest.fixture(scope="module", params=NAMES)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copy(CONFIGS / f"{request.param}.json", folder / "config.json")
    hf = get_config(str(folder), trust_remote_code=False)
    text = get_hf_text_config(hf)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(hf.model_type, ModelArchConfigConvertorBase)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return Read(config, hf, text, convertor(hf, text).convert())


def test_layers_heads_and_width(read: Read) -> None:
    geometry = geometry_from_config(read.config, "config.json")
    full = next((layer for layer in geometry.layers if layer.kind == "full"), geometry.layers[0])
    assert len(geometry.layers) == read.arch.total_num_hidden_layers
    assert geometry.is_mla == read.arch.is_deepseek_mla
    assert full.k_dim == read.arch.head_size
    assert full.kv_heads == (1 if geometry.is_mla else read.arch.total_num_kv_heads)


def test_kind_and_window_of_each_layer(read: Read) -> None:
    geometry = geometry_from_config(read.config, "config.json")
    own = [layer for layer in geometry.layers if layer.kind != "shared"]
    assert len(geometry.layers) - len(own) == getattr(read.text, "num_kv_shared_layers", 0)
    kinds = getattr(read.text, "layer_types", None)
    window = getattr(read.text, "sliding_window", None)
    if geometry.is_mla:
        assert hasattr(read.text, "index_topk") == any(layer.index_bytes for layer in own)
    elif kinds is None:  # a window for all layers, or none
        assert {layer.window for layer in own} == {window or 0}
    else:
        assert [layer.kind for layer in own] == [VLLM_KINDS[kind] for kind in kinds[: len(own)]]
        more = 1 if read.text.model_type == "cohere2" else 0
        assert {layer.window for layer in own if layer.kind == "sliding"} <= {(window or 0) + more}


def test_model_dtype(read: Read) -> None:
    dtype = _get_and_verify_dtype("no-such-folder", read.hf, "auto", is_pooling_model=False)
    assert str(dtype) == f"torch.{model_dtype(read.config, ())}"


def test_kv_dtype(read: Read) -> None:
    quantization = getattr(read.hf, "quantization_config", None)
    asked = get_kv_cache_quant_algo_string(quantization) if quantization else None
    mine = kv_quantization(read.config, read.arch.is_deepseek_mla, None)
    dtype = model_dtype(read.config, ())
    assert resolve_kv_cache_dtype("auto", dtype, mine) == (asked or dtype)


def longest(read: Read, asked: int | None) -> int:
    return int(
        _get_and_verify_max_len(
            hf_config=read.text,
            model_arch_config=read.arch,
            tokenizer_config=None,
            max_model_len=asked,
            disable_sliding_window=False,
            sliding_window=getattr(read.text, "sliding_window", None),
        )
    )


def test_context_limit(read: Read) -> None:
    limit = context_limit(read.config, "config.json")
    assert limit.longest is not None
    assert longest(read, None) == limit.default
    assert longest(read, limit.longest) == limit.longest
    with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
        longest(read, limit.longest + 1)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_context_limit_with_scaled_rope(kind: str, tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text("utf-8"))
    config |= {"rope_scaling": scaling, "original_max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hf = get_config(str(tmp_path), trust_remote_code=False)
    read = Read(config, hf, hf, ModelArchConfigConvertorBase(hf, hf).convert())
    limit = context_limit(config, "config.json")
    assert longest(read, None) == limit.default
    assert longest(read, limit.longest) == limit.longest
    with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
        longest(read, (limit.longest or 0) + 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-4b"])
def test_model_dtype_of_other_files(name: str, dtype: str, tmp_path: Path) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text("utf-8")) | {"torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hf = get_config(str(tmp_path), trust_remote_code=False)
    resolved = _get_and_verify_dtype(str(tmp_path), hf, "auto", is_pooling_model=False)
    assert str(resolved) == f"torch.{model_dtype(config)}"


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}},
        {"quant_method": "modelopt_fp4", "kv_cache_scheme": {"num_bits": 4, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": None},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"},
        {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "awq"},
    ],
)
def test_kv_scheme_of_a_quantization(quantization: dict[str, Any]) -> None:
    asked = get_kv_cache_quant_algo_string(quantization)
    assert kv_scheme(quantization) == (None if asked == "auto" else asked)


def test_the_whole_model_config_agrees(tmp_path: Path) -> None:
    """Once through vLLM's own class; the parts above are what it is made of, without seconds for each model."""
    shutil.copy(CONFIGS / "gpt-oss-20b.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    geometry = geometry_from_config(config, "config.json")
    model = ModelConfig(model=str(tmp_path), tokenizer=str(tmp_path), skip_tokenizer_init=True)
    assert {(layer.kv_heads, layer.k_dim) for layer in geometry.layers} == {
        (model.get_total_num_kv_heads(), model.get_head_size())
    }
    assert model.max_model_len == context_limit(config, "config.json").longest
    assert str(model.dtype) == f"torch.{model_dtype(config, ())}"


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    written = CONFIG_MAPPING[READ_AS.get(model_type, model_type)]
    fields = {field.name: field.default for field in dataclasses.fields(written)}
    assert {name: fields.get(name) for name in DEFAULTS[model_type]} == DEFAULTS[model_type]


@pytest.mark.parametrize("model_type", sorted(MLA_TYPES & set(DEFAULTS)))
def test_vllm_caches_the_latent_of_these_types(model_type: str) -> None:
    hf = CONFIG_MAPPING[READ_AS.get(model_type, model_type)]()
    hf.model_type = model_type
    assert ModelArchConfigConvertorBase(hf, hf).is_deepseek_mla()


def test_the_type_of_a_nested_model_is_found_without_its_own_name() -> None:
    outer = json.loads((CONFIGS / "gemma-3-4b.json").read_text("utf-8"))
    del outer["text_config"]["model_type"]
    assert language_model_type(outer) == "gemma3_text"
