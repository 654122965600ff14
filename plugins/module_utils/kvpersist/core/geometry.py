"""KV geometry: what one token's KV looks like, read from a model's config.json.

Field names are those of the public configuration classes in transformers 5.x. ``hybrid_layer_pattern`` and the
``swa_*`` fields are MiMo-V2's (1 marks a sliding-window layer); ``kv_lora_rank`` and ``qk_rope_head_dim`` are those of
DeepSeek's multi-head latent attention (MLA).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UsageError

FULL, SLIDING, MLA = "full", "sliding", "mla"
# Far beyond any model; a larger number is damage, and would only cost time and memory.
_LARGEST = 1 << 31
_MOST_LAYERS = 10_000
# Bytes of one element of KV, by dtype as vLLM spells it; the fp8 formats take one.
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2}
# One token's latent with its scales (vllm 0.32.0, vllm/v1/attention/backends/mla/flashmla_sparse.py).
_FP8_DS_MLA_BYTES = 656
_NOT_ATTENTION = ("linear_attention", "mamba", "conv", "recurrent")
# Fields of models with layers that are no attention, where no list of layers tells which (Qwen3-Next, Kimi Linear,
# Jamba, Bamba, Falcon-H1, Nemotron-H, Zamba, LFM2, MiniMax-01).
_NOT_ATTENTION_FIELDS = (
    "full_attention_interval",
    "linear_num_value_heads",
    "linear_attn_config",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "attn_layer_period",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_type_list",
    "full_attn_idxs",
)
# Which layer is the first full one after sliding-window layers, where config.json leaves that to the model's type
# (transformers 5.19, configuration_gemma3.py and so on).
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}


@dataclass(frozen=True)
class LayerKind:
    """The KV of one attention layer.

    Attributes:
        kind: ``full``, ``sliding`` or ``mla``.
        kv_heads: KV heads of the whole model, before tensor parallelism; 1 for MLA.
        k_dim: elements per head and token of the key; for MLA the latent rank plus the RoPE part.
        v_dim: elements per head and token of the value; 0 for MLA, which stores one latent for both.
        window: sliding window in tokens, 0 for none.
    """

    kind: str
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0

    def token_bytes(self, kv_cache_dtype: str, tensor_parallel_size: int) -> int:
        """KV bytes of one token on one rank. A latent, and a head where there are fewer than ranks, is on each rank."""
        if kv_cache_dtype == "fp8_ds_mla":
            return _FP8_DS_MLA_BYTES
        heads = 1 if self.kind == MLA else -(-self.kv_heads // tensor_parallel_size)
        return heads * (self.k_dim + self.v_dim) * _ELEMENT_BYTES.get(kv_cache_dtype, 1)

    def text(self) -> str:
        """``full(heads=8,k=128,v=128)``"""
        window = f",window={self.window}" if self.window else ""
        return f"{self.kind}(heads={self.kv_heads},k={self.k_dim},v={self.v_dim}{window})"


@dataclass(frozen=True)
class Geometry:
    """KV of a whole model: one entry per layer, in order."""

    layers: tuple[LayerKind, ...]

    @property
    def elements_per_token(self) -> int:
        """KV elements that one token takes in all layers together (sliding windows not yet applied)."""
        return sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers)

    def most_token_bytes(self, kv_cache_dtype: str, tensor_parallel_size: int, pipeline_parallel_size: int) -> int:
        """What the KV of one token takes at most on one rank.

        Exact for a model whose layers are alike. Every layer counts as the largest, since vLLM may pad the others up to
        it, and every pipeline stage has as many layers as the fullest.
        """
        layers = -(-len(self.layers) // pipeline_parallel_size)
        return layers * max(layer.token_bytes(kv_cache_dtype, tensor_parallel_size) for layer in self.layers)

    def text(self) -> str:
        """Run-length text that names every layer in order, e.g. ``30*full(heads=3,k=64,v=64)``."""
        runs: list[tuple[int, str]] = []
        for layer in self.layers:
            if runs and runs[-1][1] == layer.text():
                runs[-1] = (runs[-1][0] + 1, layer.text())
            else:
                runs.append((1, layer.text()))
        return " ".join(f"{count}*{text}" for count, text in runs)


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: ``text_config`` where there is one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def geometry_from_config(config: Mapping[str, Any], source: str) -> Geometry:
    """Reads the KV geometry from a parsed config.json.

    Raises:
        UsageError: naming ``source`` and the field, where a field is missing, has the wrong type or describes layers
            whose KV this version cannot tell.
    """
    reader = _Reader(language_model(config), source)
    count = reader.integer("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise reader.error("num_hidden_layers", f"it is {count}, more than {_MOST_LAYERS}")
    _refuse_other_states(reader)
    if "kv_lora_rank" in reader.config and reader.config["kv_lora_rank"] is not None:
        rank = reader.integer("kv_lora_rank") + reader.integer("qk_rope_head_dim")
        return Geometry((LayerKind(MLA, 1, rank, 0),) * count)
    full = _heads(reader, FULL, "")
    pattern = _pattern(reader, count)
    if 1 not in pattern:
        return Geometry((full,) * count)
    prefix = "swa_" if "swa_num_key_value_heads" in reader.config else ""
    other_name = reader.config.get("sliding_window") is None and "sliding_window_size" in reader.config
    window_name = "sliding_window_size" if other_name else "sliding_window"
    sliding = _heads(reader, SLIDING, prefix, reader.integer(window_name))
    return Geometry(tuple(sliding if mark else full for mark in pattern))


def rope_text(config: Mapping[str, Any]) -> str:
    """Canonical JSON of every position-encoding field of a config.json; ``{}`` where there is none."""
    model = language_model(config)
    fields = {
        name: value
        for name, value in model.items()
        if ("rope" in name or name in ("partial_rotary_factor", "rotary_pct", "rotary_dim")) and value is not None
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _heads(reader: _Reader, kind: str, prefix: str, window: int = 0) -> LayerKind:
    attention_heads = reader.integer(f"{prefix}num_attention_heads")
    kv_heads = reader.optional(f"{prefix}num_key_value_heads") or attention_heads
    k_dim = reader.optional(f"{prefix}head_dim") or _division(reader, attention_heads)
    v_dim = reader.optional(f"{prefix}v_head_dim") or k_dim
    return LayerKind(kind, kv_heads, k_dim, v_dim, window)


def _division(reader: _Reader, attention_heads: int) -> int:
    hidden = reader.integer("hidden_size")
    if hidden % attention_heads:
        raise reader.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads {attention_heads}")
    return hidden // attention_heads


def _pattern(reader: _Reader, count: int) -> list[int]:
    """1 for each sliding-window layer, 0 for each full one."""
    config = reader.config
    if isinstance(config.get("hybrid_layer_pattern"), list):
        marks = [1 if mark else 0 for mark in config["hybrid_layer_pattern"]]
        name = "hybrid_layer_pattern"
    elif isinstance(config.get("layer_types"), list):
        name = "layer_types"
        marks = [1 if "sliding" in str(kind) or "chunked" in str(kind) else 0 for kind in config[name]]
    else:
        return _pattern_without_list(reader, count)
    if len(marks) != count:
        raise reader.error(name, f"it lists {len(marks)} layers but num_hidden_layers is {count}")
    return marks


def _pattern_without_list(reader: _Reader, count: int) -> list[int]:
    """A window on every layer, unless the model's type or a field says which layers have none."""
    config = reader.config
    if config.get("sliding_window") is None or not config.get("use_sliding_window", True):  # switched off: Qwen2
        return [0] * count
    every = reader.optional("sliding_window_pattern") or _FULL_EVERY.get(str(config.get("model_type")))
    if every:
        return [1 if (number + 1) % every else 0 for number in range(count)]
    # Qwen2's first layers have no window.
    first = reader.optional("max_window_layers") if config.get("max_window_layers") else 0
    return [1 if number >= (first or 0) else 0 for number in range(count)]


def _refuse_other_states(reader: _Reader) -> None:
    kinds = reader.config.get("layer_types")
    if isinstance(kinds, list):
        for kind in kinds:
            if any(word in str(kind) for word in _NOT_ATTENTION):
                raise reader.error("layer_types", f"layers of type {kind!r} keep a state that is not KV")
        return
    for name in _NOT_ATTENTION_FIELDS:
        if reader.config.get(name) is not None:
            raise reader.error(name, "it belongs to layers that keep a state that is not KV")


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, Any]
    source: str

    def integer(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(name, f"it is {value!r}, not a positive whole number")
        if value > _LARGEST:
            raise self.error(name, f"it is larger than {_LARGEST}")
        return value

    def optional(self, name: str) -> int | None:
        return None if self.config.get(name) is None else self.integer(name)

    def error(self, name: str, cause: str) -> UsageError:
        return UsageError(
            f"reading the KV geometry from {self.source}, field {name}",
            cause,
            "Give a model whose config.json describes its attention layers.",
        )
