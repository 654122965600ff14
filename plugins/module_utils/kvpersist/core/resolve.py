"""What vLLM makes of a model before it allocates KV: dtype, KV scheme, longest context, and what it refuses to start.

Rules are those of vLLM 0.32.0; the file is named where one comes from.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .geometry import MLA, Geometry, Reader, attention_heads, language_model, shown

# torch's names for one dtype, and the codes of safetensors headers.
_DTYPE_NAMES = {"half": "float16", "float": "float32", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_KEPT_DTYPES = ("bfloat16", "float16")
# vllm/config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS.
_NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
# vllm/transformers_utils/model_arch_config_convertor.py, derive_max_model_len_and_key.
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Kinds of RoPE whose max_position_embeddings is already the scaled one (vllm/config/model.py, _get_and_verify_max_len).
_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
# Tokens that a pinned backend's kernels take at once; a block must be a multiple (vllm/v1/attention/backends/mla).
_BACKEND_BLOCKS = {
    "CUTLASS_MLA": 128,
    "FLASHINFER_MLA": 32,
    "FLASHINFER_MLA_SPARSE": 64,
    "FLASHINFER_MLA_SPARSE_SM120": 64,
    "FLASHMLA": 64,
    "FLASHMLA_SPARSE": 64,
    "FLASH_ATTN_MLA_SPARSE": 64,
}
_INDEXER_BLOCK = 64


def kv_quantization(
    config: Mapping[str, Any], is_mla: bool, beside: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The quantization that decides about a model's KV dtype, or None.

    Args:
        config: the whole config.json.
        is_mla: whether the model caches a latent; MLA layers do not look at the scheme of compressed-tensors.
        beside: ModelOpt's hf_quant_config.json, which counts where config.json has no quantization.
    """
    found: Any = config.get("quantization_config") or beside or config.get("compression_config")
    found = found or language_model(config).get("quantization_config")
    if not isinstance(found, dict) or (is_mla and _quantization_method(found) == "compressed-tensors"):
        return None
    return found


def kv_scheme(quantization: Mapping[str, Any] | None) -> str | None:
    """KV dtype that a checkpoint's quantization asks for, or None where that is the model's own.

    Only two methods say so: ModelOpt (vllm/utils/torch_utils.py, get_kv_cache_quant_algo_string) and compressed-tensors
    (vllm/model_executor/layers/attention/attention.py). Other fp8 checkpoints, such as DeepSeek's, keep KV in the
    model's dtype.

    Raises:
        UsageError: for a compressed-tensors scheme that vLLM does not load.
    """
    method = _quantization_method(quantization)
    if not quantization or not method:
        return None
    if method.startswith("modelopt"):
        return _modelopt_scheme(quantization)
    scheme = quantization.get("kv_cache_scheme")
    if scheme is None or method != "compressed-tensors":
        return None
    if not isinstance(scheme, dict) or scheme.get("num_bits") != 8 or scheme.get("type") != "float":
        raise UsageError(
            "reading the KV scheme of the quantization",
            f"{shown(scheme)} is none that vLLM loads",
            "Use a checkpoint whose kv_cache_scheme is an 8-bit float.",
        )
    return "fp8"


def _quantization_method(quantization: Mapping[str, Any] | None) -> str:
    """Name of the method; ModelOpt's own files name their producer instead."""
    if not quantization:
        return ""
    producer, inner = quantization.get("producer"), quantization.get("quantization")
    if (isinstance(producer, dict) and producer.get("name") == "modelopt") or (
        isinstance(inner, dict) and "modelopt_quant_config" in inner
    ):
        return "modelopt"
    method = quantization.get("quant_method")
    return method.lower().replace("compressed_tensors", "compressed-tensors") if isinstance(method, str) else ""


def _modelopt_scheme(quantization: Mapping[str, Any]) -> str | None:
    nested = quantization.get("quantization")
    inner = nested if isinstance(nested, dict) else quantization
    candidates = (
        part.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo") for part in (inner, quantization)
    )
    algorithm = next((candidate for candidate in candidates if candidate), None)
    if isinstance(algorithm, dict):
        bits, is_float = algorithm.get("num_bits"), algorithm.get("type") == "float"
        if bits == 8 and is_float and algorithm.get("dynamic") is False:
            algorithm = "fp8"
        elif bits == 4 and is_float:
            algorithm = "nvfp4"
    known = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
    return known.get(algorithm.lower()) if isinstance(algorithm, str) else None


def model_dtype(config: Mapping[str, Any], stored: Collection[str] | None = None) -> str:
    """The dtype in which vLLM computes a model with ``--dtype auto`` (vllm/config/model.py, _resolve_auto_dtype).

    Args:
        config: the whole config.json.
        stored: dtypes in the headers of the weights (safetensors' codes), which decide where config.json is silent.

    Returns:
        bfloat16 or float16: a float32 model is computed in bfloat16, and so is one of a dtype that no GPU since Ampere
        computes in.

    Raises:
        LookupError: where config.json is silent and ``stored`` is not given.
    """
    named = next(_dtypes_named(config), None)
    if named is None:
        if stored is None:
            raise LookupError("config.json names no dtype")
        named = _widest(stored)
    refused = config.get("model_type") in _NO_FLOAT16 and named == "float16"
    return named if named in _KEPT_DTYPES and not refused else "bfloat16"


def _dtypes_named(config: Mapping[str, Any]) -> Iterator[str]:
    # transformers 5 writes `dtype`, earlier releases `torch_dtype`.
    for part in (config, language_model(config), config.get("vision_config"), config.get("encoder_config")):
        for name in ("dtype", "torch_dtype"):
            value = part.get(name) if isinstance(part, Mapping) else None
            if isinstance(value, str) and value:
                plain = value.replace("torch.", "")
                yield _DTYPE_NAMES.get(plain, plain)


def _widest(stored: Collection[str]) -> str:
    names = {_DTYPE_NAMES.get(code, "") for code in stored} - {""}
    return names.pop() if len(names) == 1 else "float32"


@dataclass(frozen=True)
class ContextLimit:
    """How long a context may be.

    Attributes:
        longest: tokens that vLLM accepts for ``--max-model-len``; None where config.json sets no limit.
        default: tokens that it takes when none are given.
        key: the field that sets the limit.
    """

    longest: int | None
    default: int
    key: str


def context_limit(config: Mapping[str, Any], source: str) -> ContextLimit:
    """Longest context of a model (vllm/config/model.py, _get_and_verify_max_len).

    The tokenizer's ``model_max_length`` plays no part: vLLM looks at it for pooling models alone.

    Raises:
        UsageError: naming the field, where one has the wrong type.
    """
    reader = Reader.of(config, source)
    present = {name: reader.integer(name) for name in _LENGTHS if reader.get(name) is not None}
    if not present:
        return ContextLimit(None, 2048, "")
    key = min(present, key=lambda name: present[name])
    if "model_max_length" in present:
        key = "model_max_length"
    ropes = list(_ropes(reader))
    factor = 1.0
    if "gemma3" not in reader.model_type:  # whose limit is already the scaled one
        for kind, given in ropes:
            factor = factor if kind in _ALREADY_SCALED else given
    longest = int(present[key] * factor)
    default = longest
    if any(kind == "longrope" for kind, _ in ropes):
        default = reader.optional("original_max_position_embeddings") or longest
    return ContextLimit(max(longest, present.get("model_max_length", 0)), default, key)


def _ropes(reader: Reader) -> Iterator[tuple[str, float]]:
    """Kind and factor of each RoPE; models with several kinds of layers may have one for each."""
    given = reader.get("rope_scaling") or reader.get("rope_parameters")
    if not isinstance(given, dict):
        return
    parts = (
        list(given.values())
        if given and all(isinstance(part, (dict, type(None))) for part in given.values())
        else [given]
    )
    for part in parts:
        if not part:
            continue
        kind = part.get("rope_type") or part.get("type") or "default"
        if reader.model_type == "phi3" and kind in ("su", "yarn"):
            kind = "longrope"
        factor = part.get("factor")
        factor = 1.0 if factor is None else factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e6:
            raise reader.error("rope_scaling", f"its factor is {shown(factor)}, not a positive number")
        yield ("longrope" if kind == "su" else str(kind)), float(factor)


@dataclass(frozen=True)
class EngineShape:
    """The engine settings that must fit a model."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    max_model_len: int
    block_size: int
    device: str
    options: Mapping[str, Sequence[str]]


def shape_problems(config: Mapping[str, Any], geometry: Geometry, shape: EngineShape, source: str) -> list[str]:
    """Why vLLM would not start a model with these settings, or would store KV in a layout that nothing pins.

    Args:
        config: the whole config.json.
        source: path of that file, for messages.

    Returns:
        Problems, each a line with what to do about it.

    Raises:
        UsageError: where config.json cannot be read.
    """
    return [
        *_parallel_problems(config, geometry, shape, source),
        *_length_problems(config, shape, source),
        *_block_problems(geometry, shape),
    ]


def _parallel_problems(config: Mapping[str, Any], geometry: Geometry, shape: EngineShape, source: str) -> Iterable[str]:
    tensor, context = shape.tensor_parallel_size, shape.decode_context_parallel_size
    variable = "vllm_engine_tensor_parallel_size"
    heads = attention_heads(config, source)
    for number in heads:
        if number % tensor:
            yield f"{number} attention heads of {source} cannot be shared by {tensor} GPUs. Change {variable}."
    own = [layer for layer in geometry.layers if layer.kind != MLA and layer.kv_heads]
    kv_heads = sorted({layer.kv_heads for layer in own})
    for number in kv_heads:
        if number % tensor and tensor % number:
            yield f"{number} KV heads of {source} can be neither split nor copied to {tensor} GPUs. Change {variable}."
    if shape.pipeline_parallel_size > len(geometry.layers):
        yield f"{source} has {len(geometry.layers)} layers. Lower --pipeline-parallel-size."
    if context > 1 and tensor % context:
        yield f"--decode-context-parallel-size {context} does not divide {variable} {tensor}. Change one of them."
    if context > 1 and kv_heads and context > tensor // kv_heads[-1]:
        most = max(1, tensor // kv_heads[-1])
        yield f"--decode-context-parallel-size {context} is more than {kv_heads[-1]} KV heads allow. Use {most}."


def _length_problems(config: Mapping[str, Any], shape: EngineShape, source: str) -> Iterable[str]:
    if any(name.partition(".")[0] == "--hf-overrides" for name in shape.options):
        return  # it may be there to lengthen the context
    limit = context_limit(config, source)
    if limit.longest is not None and shape.max_model_len > limit.longest:
        yield (
            f"vllm_engine_max_model_len {shape.max_model_len} is more than the {limit.longest} tokens of {limit.key} "
            f"in {source}. Lower it, or extend the context with --hf-overrides."
        )


def _block_problems(geometry: Geometry, shape: EngineShape) -> Iterable[str]:
    if shape.device != "cuda":
        return
    backend = attention_backend(shape.options)
    sparse = any(layer.index_bytes for layer in geometry.layers)
    step = max(_BACKEND_BLOCKS.get(backend, 1), _INDEXER_BLOCK if sparse else 1)
    if shape.block_size % step:
        name = backend if _BACKEND_BLOCKS.get(backend) == step else "the sparse-attention indexer"
        yield f"vllm_engine_block_size {shape.block_size} is no multiple of {step}, which {name} needs. Change it."
    if sparse and backend == "auto":
        yield (
            "The KV layout of sparse MLA depends on the attention backend, which vLLM picks by the GPU. "
            "Add --attention-backend to vllm_engine_extra_args."
        )


def attention_backend(options: Mapping[str, Sequence[str]]) -> str:
    """The attention backend that a command line pins, in capitals; ``auto`` where it pins none.

    Args:
        options: as ``engine_args.parse_options`` returns them.
    """
    names = ("--attention-backend", "--attention-config.backend", "-ac.backend")
    found = [value for name in names for value in options.get(name, ())]
    for text in options.get("--attention-config", ()):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue  # vLLM refuses to start with it
        if isinstance(value, dict) and isinstance(value.get("backend"), str):
            found.append(value["backend"])
    return found[-1].upper() if found and found[-1].lower() != "auto" else "auto"
