"""Geometry, sizes and context limits of published models, from their config.json; every number is written by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core.errors import UsageError
from kvpersist.core.geometry import attention_heads, geometry_from_config, language_model, rope_text
from kvpersist.core.identity import resolve_kv_cache_dtype
from kvpersist.core.resolve import EngineShape, context_limit, kv_quantization, model_dtype, shape_problems

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
SOURCE = "/data/model/config.json"


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    return config


@dataclass(frozen=True)
class Expected:
    """Bytes are those of one token in all layers, in the dtype of the model, on one GPU and on each of four."""

    text: str
    token_bytes: int
    token_bytes_of_four: int
    longest: int
    dtype: str = "bfloat16"


LLAMA_LIKE = "full(heads=8,k=128,v=128)"
EXPECTED = {
    "llama-3.1-8b": Expected(f"32*{LLAMA_LIKE}", 131_072, 32_768, 131_072),
    "qwen3-30b-a3b": Expected("48*full(heads=4,k=128,v=128)", 98_304, 24_576, 40_960),
    "qwen2.5-7b": Expected("28*full(heads=4,k=128,v=128)", 57_344, 14_336, 32_768),
    "qwen2.5-vl-7b": Expected("28*full(heads=4,k=128,v=128)", 57_344, 14_336, 128_000),
    "mistral-7b-v0.1": Expected("32*sliding(heads=8,k=128,v=128,window=4096)", 131_072, 32_768, 32_768),
    # Its config.json names neither heads nor their width.
    "gemma-3-4b": Expected(
        " ".join(["5*sliding(heads=4,k=256,v=256,window=1024) 1*full(heads=4,k=256,v=256)"] * 5)
        + " 4*sliding(heads=4,k=256,v=256,window=1024)",
        139_264,
        34_816,
        131_072,
    ),
    # 15 of 35 layers read the KV of others; two KV heads are copied to four GPUs.
    "gemma-3n-e4b": Expected(
        " ".join(["4*sliding(heads=2,k=256,v=256,window=512) 1*full(heads=2,k=256,v=256)"] * 4) + " 15*shared",
        40_960,
        20_480,
        32_768,
    ),
    "gpt-oss-20b": Expected(
        " ".join(["1*sliding(heads=8,k=64,v=64,window=128) 1*full(heads=8,k=64,v=64)"] * 12), 49_152, 12_288, 131_072
    ),
    "deepseek-v3": Expected("61*mla(heads=1,k=576,v=0)", 70_272, 70_272, 163_840),
    "deepseek-v3.2": Expected("61*mla(heads=1,k=576,v=0,index=132)", 78_324, 78_324, 163_840),
    "kimi-k2": Expected("61*mla(heads=1,k=576,v=0)", 70_272, 70_272, 131_072),
    "mimo-v2-flash": Expected(
        "1*full(heads=4,k=192,v=128) 4*sliding(heads=8,k=192,v=128,window=128) "
        + "1*full(heads=4,k=192,v=128) 5*sliding(heads=8,k=192,v=128,window=128) " * 7
        + "1*full(heads=4,k=192,v=128)",
        222_720,
        55_680,
        262_144,
    ),
    "phi-3-mini-128k": Expected("32*sliding(heads=32,k=96,v=96,window=262144)", 393_216, 98_304, 131_072),
    "llama-4-scout": Expected(
        " ".join([f"3*chunked(heads=8,k=128,v=128,window=8192) 1*{LLAMA_LIKE}"] * 12), 196_608, 49_152, 10_485_760
    ),
    "glm-4.5-air": Expected(f"46*{LLAMA_LIKE}", 188_416, 47_104, 131_072),
    "command-r7b": Expected(
        " ".join([f"3*sliding(heads=8,k=128,v=128,window=4097) 1*{LLAMA_LIKE}"] * 8), 131_072, 32_768, 132_096
    ),
    "llava-1.5-7b": Expected("32*full(heads=32,k=128,v=128)", 524_288, 131_072, 4_096, dtype="float16"),
    "falcon-7b": Expected("32*full(heads=1,k=64,v=64)", 8_192, 8_192, 2_048),
}
REFUSED = {
    "falcon-mamba-7b": ("model_type", "keep a state that is not KV"),
    "jamba-v0.1": ("mamba_d_state", "keep a state that is not KV"),
    "llama-3.2-11b-vision": ("cross_attention_layers", "keep KV of images"),
    "nemotron-h-8b": ("mamba_num_heads", "keep a state that is not KV"),
    "qwen3-next-80b-a3b": ("full_attention_interval", "keep a state that is not KV"),
}


def test_every_file_has_an_expectation() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == {*EXPECTED, *REFUSED}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_model(name: str) -> None:
    config, expected = config_of(name), EXPECTED[name]
    geometry = geometry_from_config(config, SOURCE)
    assert geometry.text() == expected.text
    assert model_dtype(config, ()) == expected.dtype
    assert geometry.bytes_per_token(expected.dtype) == expected.token_bytes
    assert geometry.bytes_per_token(expected.dtype, 4) == expected.token_bytes_of_four
    assert context_limit(config, SOURCE).longest == expected.longest


@pytest.mark.parametrize("name", EXPECTED)
def test_their_kv_is_of_the_model_s_dtype(name: str) -> None:
    """None of them names a KV scheme; DeepSeek's fp8 is that of the weights."""
    config = config_of(name)
    quantization = kv_quantization(config, geometry_from_config(config, SOURCE).is_mla, None)
    assert resolve_kv_cache_dtype("auto", EXPECTED[name].dtype, quantization) == EXPECTED[name].dtype


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_another_state_is_refused_in_one_line(name: str) -> None:
    field, cause = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        geometry_from_config(config_of(name), SOURCE)
    assert str(caught.value).startswith(f"reading the KV geometry from {SOURCE}, field {field}: ")
    assert cause in caught.value.cause
    assert "\n" not in str(caught.value)


# Whatever a file holds


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
VALUES = JSON | st.sampled_from([0, 1, 2, 4, 8, 64, "full_attention", ["sliding_attention", "full_attention"], [0, 1]])
FIELDS = sorted(
    {
        name
        for path in CONFIGS.glob("*.json")
        for part in [json.loads(path.read_text("utf-8"))]
        for name in (*part, *language_model(part))
    }
    | {"index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "global_head_dim", "rope_parameters"}
    | {"thinker_config", "is_encoder_decoder", "num_global_key_value_heads", "attention_k_eq_v", "dtype"}
)
DAMAGED = st.builds(
    lambda name, changes, nested: {
        **config_of(name),
        **({"text_config": {**language_model(config_of(name)), **changes}} if nested else changes),
    },
    st.sampled_from(sorted({*EXPECTED, *REFUSED})),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    st.booleans(),
)
INVENTED = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=12)


@given(DAMAGED | INVENTED, st.integers(1, 16))
def test_any_file_is_read_or_refused_in_one_line(config: dict[str, Any], gpus: int) -> None:
    shape = EngineShape(gpus, 1, 1, 4096, 16, "cuda", {})
    try:
        geometry = geometry_from_config(config, SOURCE)
        assert geometry.bytes_per_token("bfloat16", gpus) > 0
        assert geometry.text()
        problems = shape_problems(config, geometry, shape, SOURCE)
        assert all("\n" not in problem for problem in problems)
        assert attention_heads(config, SOURCE)
        resolve_kv_cache_dtype("auto", model_dtype(config, ()), kv_quantization(config, geometry.is_mla, None))
    except UsageError as error:
        text = str(error)
        assert "\n" not in text
        assert len(text) < 400
    assert json.loads(rope_text(config)) is not None
