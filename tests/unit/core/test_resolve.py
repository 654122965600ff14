"""What vLLM would refuse to start, found before; and what it makes of dtypes and quantizations."""

from __future__ import annotations

from typing import Any

import pytest
from kvpersist.core.engine_args import parse_options
from kvpersist.core.errors import UsageError
from kvpersist.core.geometry import geometry_from_config
from kvpersist.core.resolve import (
    EngineShape,
    attention_backend,
    context_limit,
    kv_quantization,
    kv_scheme,
    model_dtype,
    shape_problems,
)

SOURCE = "/data/model/config.json"
GQA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
SPARSE_MLA = {
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_head_dim": 128,
    "max_position_embeddings": 163_840,
}

PINNED = "--attention-backend FLASHMLA_SPARSE"


def problems(config: dict[str, Any], args: str = "", **shape: Any) -> list[str]:
    options = parse_options(args.split())
    values = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "max_model_len": 8192,
        "block_size": 64,
        "device": "cuda",
        **shape,
    }
    return shape_problems(config, geometry_from_config(config, SOURCE), EngineShape(options=options, **values), SOURCE)


@pytest.mark.parametrize(
    ("config", "args", "shape"),
    [
        (GQA, "", {}),
        (GQA, "", {"tensor_parallel_size": 8}),
        (GQA, "", {"tensor_parallel_size": 16}),  # each KV head lies on two GPUs
        (GQA, "", {"tensor_parallel_size": 16, "decode_context_parallel_size": 2}),
        (GQA, "--hf-overrides {}", {"max_model_len": 1_000_000}),
        (SPARSE_MLA, PINNED, {}),
        (SPARSE_MLA, "", {"device": "cpu", "block_size": 32}),
        (SPARSE_MLA, "-ac.backend FLASHMLA_SPARSE", {"decode_context_parallel_size": 4}),
        ({**GQA, "rope_scaling": {"type": "dynamic", "factor": 4}}, "", {"max_model_len": 32_768}),
    ],
)
def test_settings_that_fit_a_model(config: dict[str, Any], args: str, shape: dict[str, Any]) -> None:
    assert problems(config, args, **shape) == []


@pytest.mark.parametrize(
    ("config", "args", "shape", "message"),
    [
        (
            GQA,
            "",
            {"tensor_parallel_size": 32},
            "48 attention heads of /data/model/config.json cannot be shared by 32 GPUs",
        ),
        (
            GQA,
            "",
            {"tensor_parallel_size": 12},
            "8 KV heads of /data/model/config.json can be neither split nor copied",
        ),
        (GQA, "", {"pipeline_parallel_size": 33}, "has 32 layers. Lower --pipeline-parallel-size"),
        (SPARSE_MLA, PINNED, {"decode_context_parallel_size": 3}, "does not divide vllm_engine_tensor_parallel_size 4"),
        (GQA, "", {"decode_context_parallel_size": 2}, "is more than 8 KV heads allow. Use 1."),
        (
            GQA,
            "",
            {"max_model_len": 8193},
            "vllm_engine_max_model_len 8193 is more than the 8192 tokens of max_position",
        ),
        (
            {**GQA, "rope_scaling": {"type": "yarn", "factor": 4}},
            "",
            {"max_model_len": 32_768},
            "is more than the 8192 tokens",
        ),
        (
            SPARSE_MLA,
            PINNED,
            {"block_size": 16},
            "is no multiple of 64, which FLASHMLA_SP",
        ),
        (GQA, "--attention-backend=cutlass_mla", {"block_size": 64}, "is no multiple of 128, which CUTLASS_MLA needs"),
        (SPARSE_MLA, "", {}, "depends on the attention backend, which vLLM picks by the GPU. Add --attention-backend"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    config: dict[str, Any], args: str, shape: dict[str, Any], message: str
) -> None:
    found = problems(config, args, **shape)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("args", "backend"),
    [
        ("", "auto"),
        ("--attention-backend auto", "auto"),
        ("--attention-backend flash_attn", "FLASH_ATTN"),
        ("--attention_backend=FLASHINFER", "FLASHINFER"),
        ('--attention-config {"backend":"TRITON_ATTN"}', "TRITON_ATTN"),
        ("-ac.backend TRITON_ATTN", "TRITON_ATTN"),
        ("--attention-config {", "auto"),
    ],
)
def test_a_pinned_attention_backend_is_found(args: str, backend: str) -> None:
    assert attention_backend(parse_options(args.split())) == backend


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(["BF16"], "bfloat16"), (["F16", "I32"], "float16"), (["F32"], "bfloat16"), (["F16", "F32"], "bfloat16")],
)
def test_weights_decide_about_the_dtype_where_config_json_is_silent(stored: list[str], dtype: str) -> None:
    assert model_dtype({}, stored) == dtype
    assert model_dtype({"text_config": {"dtype": "float16"}}, stored) == "float16"
    with pytest.raises(LookupError):
        model_dtype({})


FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def test_a_kv_scheme_of_compressed_tensors_counts_except_for_mla() -> None:
    config = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_KV}}
    assert kv_scheme(kv_quantization(config, False, None)) == "fp8"
    assert kv_scheme(kv_quantization(config, True, None)) is None
    with pytest.raises(UsageError, match="is none that vLLM loads"):
        kv_scheme({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4, "type": "int"}})


def test_modelopt_s_own_file_counts_where_config_json_has_no_quantization() -> None:
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    assert kv_scheme(kv_quantization({}, False, beside)) == "fp8_e4m3"
    assert kv_scheme(kv_quantization({"quantization_config": {"quant_method": "awq"}}, False, beside)) is None


def test_the_packed_mla_format_has_a_size_of_its_own() -> None:
    geometry = geometry_from_config(SPARSE_MLA, SOURCE)
    assert geometry.bytes_per_token("fp8_ds_mla", 4) == 61 * (656 + 132)
    with pytest.raises(UsageError, match="KV cache dtype 'fp8_ds_mla' has no size there"):
        geometry_from_config(GQA, SOURCE).bytes_per_token("fp8_ds_mla")


def test_a_factor_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="field rope_scaling: its factor is 'x', not a positive number"):
        context_limit({**GQA, "rope_scaling": {"type": "linear", "factor": "x"}}, SOURCE)


GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}


def test_gemma_4_s_full_layers_have_heads_of_their_own() -> None:
    assert geometry_from_config(GEMMA4, SOURCE).text() == (
        "5*sliding(heads=4,k=256,v=256,window=512) 1*full(heads=2,k=512,v=512) "
        "4*sliding(heads=4,k=256,v=256,window=512) 2*shared"
    )


@pytest.mark.parametrize(
    ("fields", "indexers"),
    [({}, 61), ({"index_topk_freq": 4}, 16), ({"index_topk_pattern": "FSSS"}, 58)],
)
def test_layers_may_share_an_indexer(fields: dict[str, Any], indexers: int) -> None:
    layers = geometry_from_config({**SPARSE_MLA, **fields}, SOURCE).layers
    assert sum(layer.index_bytes > 0 for layer in layers) == indexers


def test_a_latent_that_vllm_does_not_cache_is_refused() -> None:
    with pytest.raises(UsageError, match="vLLM does not cache the latent of model type 'minicpm3'"):
        geometry_from_config({**GQA, "model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32}, SOURCE)
