"""KV geometry of the published model families, from the fields of their config.json."""

from __future__ import annotations

from typing import Any

import pytest
from kvpersist.core.errors import EXIT_USAGE, UsageError
from kvpersist.core.geometry import (
    FULL,
    MLA,
    SLIDING,
    Geometry,
    LayerKind,
    geometry_from_config,
    language_model,
    rope_text,
)

SOURCE = "/data/model/config.json"
Config = dict[str, Any]

LLAMA_3_8B: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rope_scaling": None,
}
# Head width is given and differs from hidden_size / num_attention_heads.
QWEN3_30B_A3B: Config = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
}
# A window that is switched off.
QWEN2_7B: Config = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
MISTRAL_7B_V1: Config = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
GEMMA3_LANGUAGE: Config = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "head_dim": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
}
GEMMA3: Config = {
    "model_type": "gemma3",
    "text_config": GEMMA3_LANGUAGE,
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
}
GPT_OSS_20B: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MIMO_V2: Config = {
    "model_type": "mimo_v2",
    "hidden_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1, 0, 1],
}


@pytest.mark.parametrize(
    ("config", "text", "elements"),
    [
        pytest.param(LLAMA_3_8B, "32*full(heads=8,k=128,v=128)", 32 * 8 * 256, id="llama-3"),
        pytest.param(QWEN3_30B_A3B, "48*full(heads=4,k=128,v=128)", 48 * 4 * 256, id="qwen3"),
        pytest.param(QWEN2_7B, "28*full(heads=4,k=128,v=128)", 28 * 4 * 256, id="qwen2"),
        pytest.param(MISTRAL_7B_V1, "32*sliding(heads=8,k=128,v=128,window=4096)", 32 * 8 * 256, id="mistral"),
        pytest.param(
            GEMMA3,
            "5*sliding(heads=16,k=128,v=128,window=1024) 1*full(heads=16,k=128,v=128) "
            "5*sliding(heads=16,k=128,v=128,window=1024) 1*full(heads=16,k=128,v=128)",
            12 * 16 * 256,
            id="gemma3",
        ),
        pytest.param(
            GPT_OSS_20B,
            " ".join(["1*sliding(heads=8,k=64,v=64,window=128) 1*full(heads=8,k=64,v=64)"] * 12),
            24 * 8 * 128,
            id="gpt-oss",
        ),
        pytest.param(DEEPSEEK_V3, "61*mla(heads=1,k=576,v=0)", 61 * 576, id="deepseek-v3"),
        pytest.param(
            MIMO_V2,
            "1*full(heads=4,k=192,v=128) 5*sliding(heads=8,k=192,v=128,window=128) "
            "1*full(heads=4,k=192,v=128) 1*sliding(heads=8,k=192,v=128,window=128)",
            2 * 4 * 320 + 6 * 8 * 320,
            id="mimo-v2",
        ),
        pytest.param(
            {**MISTRAL_7B_V1, "sliding_window": None}, "32*full(heads=8,k=128,v=128)", 32 * 8 * 256, id="mistral-v3"
        ),
        pytest.param(
            {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4},
            "2*full(heads=4,k=32,v=32)",
            2 * 4 * 64,
            id="multi-head attention",
        ),
        pytest.param(
            {**LLAMA_3_8B, "num_key_value_heads": None, "head_dim": None, "kv_lora_rank": None},
            "32*full(heads=32,k=128,v=128)",
            32 * 32 * 256,
            id="nulls mean not given",
        ),
        pytest.param(
            {**MIMO_V2, "hybrid_layer_pattern": [0] * 8},
            "8*full(heads=4,k=192,v=128)",
            8 * 4 * 320,
            id="mimo, all full",
        ),
        pytest.param(
            {**QWEN2_7B, "use_sliding_window": True},
            "28*full(heads=4,k=128,v=128)",
            28 * 4 * 256,
            id="qwen2, window from layer 28 of 28 on",
        ),
        pytest.param(
            {**QWEN2_7B, "use_sliding_window": True, "max_window_layers": 21},
            "21*full(heads=4,k=128,v=128) 7*sliding(heads=4,k=128,v=128,window=131072)",
            28 * 4 * 256,
            id="qwen2, window from layer 21 on",
        ),
    ],
)
def test_geometry_of(config: Config, text: str, elements: int) -> None:
    geometry = geometry_from_config(config, SOURCE)
    assert geometry.text() == text
    assert geometry.elements_per_token == elements


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "full_layers"),
    [
        pytest.param(without(GEMMA3_LANGUAGE, "layer_types"), [5, 11], id="gemma3 of the hub"),
        pytest.param({**without(GEMMA3_LANGUAGE, "layer_types"), "sliding_window_pattern": 4}, [3, 7, 11], id="given"),
        pytest.param(
            {**without(GEMMA3_LANGUAGE, "layer_types"), "model_type": "gemma2"}, [1, 3, 5, 7, 9, 11], id="gemma2"
        ),
        pytest.param({**without(GEMMA3_LANGUAGE, "layer_types"), "model_type": "cohere2"}, [3, 7, 11], id="cohere2"),
    ],
)
def test_layers_alternate_where_only_the_model_type_says_so(config: Config, full_layers: list[int]) -> None:
    """Files on the hub are older than ``layer_types``; transformers fills it in (5.19, configuration_gemma3.py)."""
    layers = geometry_from_config(config, SOURCE).layers
    assert [number for number, layer in enumerate(layers) if layer.kind == "full"] == full_layers


# Of no known type, so that nothing has a default.
PLAIN = without(LLAMA_3_8B, "model_type")


# Models whose layers keep a state that no token owns; taking them for attention would store wrong KV.
LINEAR = {**QWEN3_30B_A3B, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        pytest.param(LINEAR, "layer_types", id="linear attention"),
        pytest.param({**LINEAR, "layer_types": ["conv", "full_attention"] * 2}, "layer_types", id="lfm2"),
        pytest.param({**LINEAR, "layer_types": ["mamba", "attention"] * 2}, "layer_types", id="granite hybrid"),
        pytest.param(
            {**without(LINEAR, "layer_types"), "full_attention_interval": 4, "linear_num_value_heads": 32},
            "full_attention_interval",
            id="qwen3-next of the hub",
        ),
        pytest.param(
            {**without(LINEAR, "layer_types"), "linear_num_value_heads": 32}, "linear_num_value_heads", id="qwen3.5"
        ),
        pytest.param({**without(LINEAR, "layer_types"), "attn_layer_period": 8}, "attn_layer_period", id="jamba"),
        pytest.param({**LLAMA_3_8B, "mamba_d_state": 256}, "mamba_d_state", id="falcon-h1, bamba"),
        pytest.param({**LLAMA_3_8B, "ssm_state_size": 128}, "ssm_state_size", id="nemotron-h"),
        pytest.param({**LLAMA_3_8B, "attn_type_list": [0, 1] * 16}, "attn_type_list", id="minimax-01"),
        pytest.param(
            {**DEEPSEEK_V3, "linear_attn_config": {"kda_layers": [1, 2, 3]}},
            "linear_attn_config",
            id="kimi linear, MLA",
        ),
        pytest.param(
            {**DEEPSEEK_V3, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
            "layer_types",
            id="linear layers beside MLA",
        ),
        pytest.param({"text_config": LINEAR}, "layer_types", id="nested"),
    ],
)
def test_layers_that_keep_another_state_are_refused(config: Config, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        geometry_from_config(config, SOURCE)
    assert str(caught.value).startswith(f"reading the KV geometry from {SOURCE}, field {field}: ")
    assert "keep a state that is not KV" in caught.value.cause
    assert caught.value.exit_code == EXIT_USAGE


def test_a_hybrid_family_s_dense_member_is_accepted() -> None:
    dense = {**LLAMA_3_8B, "layer_types": ["attention"] * 32, "mamba_d_state": 256}  # Granite 4.0 micro
    assert geometry_from_config(dense, SOURCE).text() == "32*full(heads=8,k=128,v=128)"


@pytest.mark.parametrize(
    ("config", "field", "cause"),
    [
        ({}, "num_hidden_layers", "it is None, not a positive whole number"),
        ({"text_config": {}}, "num_hidden_layers", "it is None"),
        (without(PLAIN, "num_hidden_layers"), "num_hidden_layers", "it is None"),
        (without(PLAIN, "num_attention_heads"), "num_attention_heads", "it is None"),
        (without(PLAIN, "hidden_size"), "hidden_size", "it is None"),
        ({**PLAIN, "num_hidden_layers": 0}, "num_hidden_layers", "it is 0"),
        ({**PLAIN, "num_hidden_layers": "32"}, "num_hidden_layers", "it is '32'"),
        ({**PLAIN, "num_hidden_layers": True}, "num_hidden_layers", "it is True"),
        ({**PLAIN, "num_key_value_heads": -8}, "num_key_value_heads", "it is -8"),
        ({**PLAIN, "num_key_value_heads": 0}, "num_key_value_heads", "it is 0"),
        ({**PLAIN, "head_dim": 128.0}, "head_dim", "it is 128.0"),
        ({**PLAIN, "hidden_size": 4100}, "hidden_size", "4100 is not a multiple of num_attention_heads 32"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim", "it is None"),
        ({**DEEPSEEK_V3, "kv_lora_rank": 0}, "kv_lora_rank", "it is 0"),
        ({**GPT_OSS_20B, "sliding_window": None}, "sliding_window", "it is None"),
        ({**GPT_OSS_20B, "sliding_window": "128"}, "sliding_window", "it is '128'"),
        ({**GPT_OSS_20B, "layer_types": ["full_attention"] * 23}, "layer_types", "it lists 23 layers but"),
        (without(MIMO_V2, "swa_num_attention_heads"), "swa_num_attention_heads", "it is None"),
        ({**MIMO_V2, "hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern", "it lists 2 layers but"),
        ({**QWEN2_7B, "use_sliding_window": True, "max_window_layers": "21"}, "max_window_layers", "it is '21'"),
        ({**MISTRAL_7B_V1, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern", "it is 'LLLG'"),
    ],
)
def test_a_missing_or_wrong_field_is_named_with_its_file(config: Config, field: str, cause: str) -> None:
    with pytest.raises(UsageError) as caught:
        geometry_from_config(config, SOURCE)
    assert str(caught.value).startswith(f"reading the KV geometry from {SOURCE}, field {field}: {cause}")


def test_any_difference_between_layers_shows_in_the_text() -> None:
    base = LayerKind("full", 8, 128, 128)
    others = [
        LayerKind("sliding", 8, 128, 128, 4096),
        LayerKind("sliding", 8, 128, 128, 2048),
        LayerKind("full", 4, 128, 128),
        LayerKind("full", 8, 64, 128),
        LayerKind("full", 8, 128, 64),
    ]
    texts = {Geometry((base, other)).text() for other in others}
    assert len(texts) == len(others)
    assert Geometry((base, others[0])).text() != Geometry((others[0], base)).text()


def test_the_language_model_is_found_where_it_is_nested() -> None:
    assert language_model(GEMMA3) is GEMMA3_LANGUAGE
    assert language_model(LLAMA_3_8B) is LLAMA_3_8B
    assert language_model({"text_config": None, "a": 1}) == {"text_config": None, "a": 1}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LLAMA_3_8B, '{"rope_theta":500000.0}'),
        ({"hidden_size": 1}, "{}"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}, "partial_rotary_factor": 0.5, "rotary_dim": None},
            '{"partial_rotary_factor":0.5,"rope_scaling":{"factor":4,"type":"yarn"}}',
        ),
        ({"text_config": {"rope_local_base_freq": 10000.0}, "rope_theta": 1}, '{"rope_local_base_freq":10000.0}'),
        ({"rotary_pct": 0.25, "swa_rope_theta": 10000}, '{"rotary_pct":0.25,"swa_rope_theta":10000}'),
    ],
)
def test_every_position_encoding_field_is_kept_in_canonical_form(config: Config, text: str) -> None:
    assert rope_text(config) == text


def test_the_order_of_fields_does_not_change_the_text() -> None:
    backwards = dict(reversed(MIMO_V2.items()))
    assert geometry_from_config(backwards, SOURCE) == geometry_from_config(MIMO_V2, SOURCE)
    nested = {"rope_parameters": {"b": 1, "a": 2}}
    assert rope_text(nested) == rope_text({"rope_parameters": {"a": 2, "b": 1}})


@pytest.mark.parametrize(
    ("layers", "dtype", "ranks", "stages", "expected"),
    [
        ([LayerKind(FULL, 8, 128, 128)] * 32, "bfloat16", 1, 1, 32 * 8 * 256 * 2),
        ([LayerKind(FULL, 8, 128, 128)] * 32, "fp8_e4m3", 4, 1, 32 * 2 * 256),
        ([LayerKind(FULL, 2, 128, 128)] * 32, "float16", 4, 1, 32 * 256 * 2),  # each rank holds a copy of one head
        ([LayerKind(FULL, 8, 192, 128)] * 33, "bfloat16", 8, 4, 9 * 320 * 2),  # the fullest stage has nine
        ([LayerKind(MLA, 1, 576, 0)] * 61, "bfloat16", 8, 1, 61 * 576 * 2),  # each rank holds the whole latent
        ([LayerKind(MLA, 1, 576, 0)] * 61, "fp8_ds_mla", 8, 1, 61 * 656),
        # The smaller layer may be padded.
        ([LayerKind(FULL, 4, 192, 128), LayerKind(SLIDING, 8, 192, 128, 128)], "bfloat16", 4, 1, 2 * 2 * 320 * 2),
    ],
)
def test_the_most_that_a_token_takes_on_a_rank(
    layers: list[LayerKind], dtype: str, ranks: int, stages: int, expected: int
) -> None:
    assert Geometry(tuple(layers)).most_token_bytes(dtype, ranks, stages) == expected
