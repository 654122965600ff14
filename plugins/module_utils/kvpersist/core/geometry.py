"""KV geometry: what one token's KV looks like, read from a model's config.json as vLLM 0.32.0 reads it.

Field names are those of the public configuration classes in transformers 5.x; what a file leaves out has the default of
its model type (model_types.py). ``hybrid_layer_pattern`` and the ``swa_*`` fields are MiMo-V2's (1 marks a
sliding-window layer); ``kv_lora_rank`` and ``qk_rope_head_dim`` are those of DeepSeek's multi-head latent attention
(MLA), ``index_*`` those of the indexer that DeepSeek-V3.2 adds to it; ``num_kv_shared_layers`` counts the last layers
of Gemma 3n and 4, which read the KV of earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .model_types import DEFAULTS, FULL_EVERY, MLA_TYPES, REFUSED_TYPES

FULL, SLIDING, CHUNKED, MLA, SHARED = "full", "sliding", "chunked", "mla", "shared"
# Far beyond any model; a larger number is damage, and would only cost time and memory.
_LARGEST = 1 << 31
_MOST_LAYERS = 10_000
# Bytes of one element by KV dtype; fp8_ds_mla packs a whole MLA layer's token into 656 bytes instead
# (vllm 0.32.0, vllm/model_executor/layers/attention/mla_attention.py).
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
_DS_MLA_BYTES = 656
# The indexer keeps its key in fp8 with one float32 scale for every 128 elements, whatever the KV dtype is
# (vllm 0.32.0, vllm/model_executor/models/deepseek_v2.py, Indexer).
_INDEX_BLOCK, _INDEX_SCALE_BYTES = 128, 4

# Where a config.json describes the language model of a model that also sees or hears.
_NESTED = ("text_config", "thinker_config", "llm_config", "language_config")
# Names of the same fact in the order in which vLLM looks for them (model_arch_config_convertor.py).
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_HIDDEN = ("hidden_size", "n_embd")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")

_FULL_TYPES = ("full_attention", "attention")
_MLA_LAYER_TYPES = (*_FULL_TYPES, "indexed_attention", "deepseek_sparse_attention")
_MARKS = {**dict.fromkeys(_FULL_TYPES, FULL), "sliding_attention": SLIDING, "chunked_attention": CHUNKED}
_NOT_ATTENTION = ("linear_attention", "mamba", "conv", "recurrent", "hybrid")
# Fields of models with layers that are no attention, where no list of layers tells which (Qwen3-Next, Kimi Linear,
# Jamba, Bamba, Falcon-H1, Nemotron-H, Zamba, LFM2, MiniMax-01, RecurrentGemma).
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
    "block_types",
)
# Fields that change the KV in a way this version does not model, with what they stand for.
_UNKNOWN_LAYOUTS = {
    "compress_ratios": "its layers keep compressed KV of several kinds",
    "block_configs": "its layers differ in a way that vLLM decides",
    "per_layer_config": "its layers differ in a way that vLLM decides",
    "attention_other_setting": "its sliding-window layers have heads of their own",
    "cross_attention_layers": "its cross-attention layers keep KV of images",
}


@dataclass(frozen=True)
class LayerKind:
    """The KV of one layer.

    Attributes:
        kind: ``full``, ``sliding``, ``chunked``, ``mla``, or ``shared`` for a layer that reads another one's KV.
        kv_heads: KV heads of the whole model, before tensor parallelism; 1 for MLA.
        k_dim: elements per head and token of the key; for MLA the latent rank plus the RoPE part.
        v_dim: elements per head and token of the value; 0 for MLA, which stores one latent for both.
        window: sliding window or attention chunk in tokens, 0 for none.
        index_bytes: bytes per token of the sparse-attention indexer's own cache, 0 where there is none.
    """

    kind: str
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    index_bytes: int = 0

    @property
    def elements(self) -> int:
        """KV elements of one token on all GPUs together, each head counted once."""
        return self.kv_heads * (self.k_dim + self.v_dim)

    def text(self) -> str:
        """``full(heads=8,k=128,v=128)``"""
        if self.kind == SHARED:
            return SHARED
        window = f",window={self.window}" if self.window else ""
        index = f",index={self.index_bytes}" if self.index_bytes else ""
        return f"{self.kind}(heads={self.kv_heads},k={self.k_dim},v={self.v_dim}{window}{index})"

    def token_bytes(self, kv_cache_dtype: str, tensor_parallel_size: int) -> int:
        """Bytes that one token takes in this layer on one GPU."""
        if kv_cache_dtype == "fp8_ds_mla" and self.kind == MLA:
            return _DS_MLA_BYTES + self.index_bytes
        size = _ELEMENT_BYTES.get(kv_cache_dtype)
        if size is None:
            raise UsageError(
                f"counting the KV bytes of {self.text()}",
                f"KV cache dtype {kv_cache_dtype!r} has no size there",
                f"Use one of {', '.join(_ELEMENT_BYTES)}.",
            )
        # Fewer heads than GPUs are replicated, so that each GPU has one (ModelConfig.get_num_kv_heads).
        heads = max(1, self.kv_heads // tensor_parallel_size) if self.kv_heads else 0
        return heads * (self.k_dim + self.v_dim) * size + self.index_bytes


@dataclass(frozen=True)
class Geometry:
    """KV of a whole model: one entry per layer, in order."""

    layers: tuple[LayerKind, ...]

    @property
    def elements_per_token(self) -> int:
        """KV elements that one token takes in all layers together (sliding windows not yet applied)."""
        return sum(layer.elements for layer in self.layers)

    @property
    def is_mla(self) -> bool:
        """Whether the layers keep one latent instead of keys and values."""
        return any(layer.kind == MLA for layer in self.layers)

    def bytes_per_token(self, kv_cache_dtype: str, tensor_parallel_size: int = 1) -> int:
        """Bytes that one token takes on one GPU in all layers together (sliding windows not yet applied).

        Args:
            kv_cache_dtype: as vLLM spells it, resolved.
            tensor_parallel_size: GPUs that share the KV heads; MLA keeps its latent on each of them.

        Raises:
            UsageError: for a dtype whose size is not known for these layers.
        """
        return sum(layer.token_bytes(kv_cache_dtype, tensor_parallel_size) for layer in self.layers)

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
    """The part of a config.json that describes the language model: ``text_config`` or the like where there is one."""
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, dict):
            return language_model(nested) if name == "thinker_config" else nested
    return config


def language_model_type(config: Mapping[str, Any]) -> str:
    """Model type of the language model; empty where a config.json names none."""
    model = language_model(config)
    own, outer = model.get("model_type"), config.get("model_type")
    if isinstance(own, str):
        return own
    return f"{outer}_text" if f"{outer}_text" in DEFAULTS else ""


def geometry_from_config(config: Mapping[str, Any], source: str) -> Geometry:
    """Reads the KV geometry from a parsed config.json.

    Raises:
        UsageError: naming ``source`` and the field, where a field is missing, has the wrong type or describes layers
            whose KV this version cannot tell.
    """
    reader = Reader.of(config, source)
    _refuse_what_is_not_modelled(reader, config)
    count = reader.first(_LAYERS)
    if count > _MOST_LAYERS:
        raise reader.error(_LAYERS[0], f"it is {count}, more than {_MOST_LAYERS}")
    if reader.get("kv_lora_rank") is not None:
        return Geometry(_mla_layers(reader, count))
    marks = _marks(reader, count)
    kinds = {mark: _layer_kind(reader, mark) for mark in dict.fromkeys(marks)}
    own = count - reader.whole("num_kv_shared_layers")
    if own < 1:
        raise reader.error("num_kv_shared_layers", f"it leaves none of {count} layers with KV of its own")
    shared = LayerKind(SHARED, 0, 0, 0)
    return Geometry(tuple(kinds[mark] if number < own else shared for number, mark in enumerate(marks)))


def rope_text(config: Mapping[str, Any]) -> str:
    """Canonical JSON of every position-encoding field of a config.json; ``{}`` where there is none."""
    model = language_model(config)
    fields = {
        name: value
        for name, value in model.items()
        if ("rope" in name or name in ("partial_rotary_factor", "rotary_pct", "rotary_dim")) and value is not None
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def attention_heads(config: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Query heads of the whole model, once for each kind of layer that has its own number.

    Raises:
        UsageError: where the number cannot be read.
    """
    reader = Reader.of(config, source)
    heads = [reader.first(_HEADS)]
    if reader.get("swa_num_attention_heads") is not None:
        heads.append(reader.integer("swa_num_attention_heads"))
    return tuple(dict.fromkeys(heads))


def _mla_layers(reader: Reader, count: int) -> tuple[LayerKind, ...]:
    if reader.model_type not in MLA_TYPES:
        raise reader.error("kv_lora_rank", f"vLLM does not cache the latent of model type {reader.model_type!r}")
    kinds = reader.get("layer_types")
    if isinstance(kinds, list) and any(kind not in _MLA_LAYER_TYPES for kind in kinds):
        raise reader.error("layer_types", "it names layers that are unknown beside MLA")
    rank = reader.integer("kv_lora_rank") + reader.whole("qk_rope_head_dim", required=True)
    plain = LayerKind(MLA, 1, rank, 0)
    if reader.get("index_topk") is None:
        return (plain,) * count
    head = reader.integer("index_head_dim")
    indexed = LayerKind(MLA, 1, rank, 0, index_bytes=head + head // _INDEX_BLOCK * _INDEX_SCALE_BYTES)
    return tuple(indexed if has_indexer else plain for has_indexer in _indexers(reader, count))


def _indexers(reader: Reader, count: int) -> list[bool]:
    """For each layer, whether it has an indexer of its own; the others take the choice of an earlier layer."""
    pattern = reader.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, (str, list)):
            raise reader.error("index_topk_pattern", "it is no pattern of letters")
        return [not (number < len(pattern) and pattern[number] == "S") for number in range(count)]
    frequency = reader.optional("index_topk_freq") or 1
    offset = reader.whole("index_skip_topk_offset") if reader.get("index_skip_topk_offset") is not None else 2
    return [max(number - offset + 1, 0) % frequency == 0 for number in range(count)]


def _layer_kind(reader: Reader, mark: str) -> LayerKind:
    if mark == SLIDING:
        prefix = "swa_" if reader.get("swa_num_key_value_heads") is not None else ""
        return _heads(reader, SLIDING, prefix, _window(reader))
    if mark == CHUNKED:
        return _heads(reader, CHUNKED, "", reader.integer("attention_chunk_size"))
    full = _heads(reader, FULL, "")
    if reader.model_type != "gemma4_text":
        return full
    # Gemma 4's full layers have heads of their own (transformers 5.19.0, configuration_gemma4.py).
    width = reader.optional("global_head_dim") or 512
    fewer = reader.optional("num_global_key_value_heads") if reader.get("attention_k_eq_v") else None
    return LayerKind(FULL, fewer or full.kv_heads, width, width)


def _window(reader: Reader) -> int:
    other_name = reader.get("sliding_window") is None and reader.get("sliding_window_size") is not None
    window = reader.integer("sliding_window_size" if other_name else "sliding_window")
    # Cohere's layers see that many tokens beside the current one (vllm 0.32.0, commandr.py).
    return window + 1 if reader.model_type == "cohere2" else window


def _heads(reader: Reader, kind: str, prefix: str, window: int = 0) -> LayerKind:
    heads = reader.integer(f"{prefix}num_attention_heads") if prefix else reader.first(_HEADS)
    k_dim = reader.optional(f"{prefix}head_dim") or _division(reader, heads)
    return LayerKind(kind, _kv_heads(reader, prefix, heads), k_dim, _v_dim(reader, prefix, k_dim), window)


def _kv_heads(reader: Reader, prefix: str, heads: int) -> int:
    if prefix:
        return reader.integer(f"{prefix}num_key_value_heads")
    if reader.get("multi_query") and not reader.get("new_decoder_architecture"):  # Falcon
        return 1
    if reader.get("multi_query_attention") is False:  # ChatGLM without grouped heads
        return heads
    names = [name for name in _KV_HEADS if reader.get(name) is not None]
    return reader.integer(names[0]) if names else heads


def _v_dim(reader: Reader, prefix: str, k_dim: int) -> int:
    given = reader.get(f"{prefix}v_head_dim")
    if "hybrid_layer_pattern" in reader.config or reader.model_type.startswith("mimo_v2"):
        return reader.optional(f"{prefix}v_head_dim") or k_dim
    if given is not None and given not in (0, k_dim):
        raise reader.error("v_head_dim", f"values of another width than keys are known of MiMo-V2 only, not {given!r}")
    return k_dim


def _division(reader: Reader, heads: int) -> int:
    hidden = reader.first(_HIDDEN)
    if hidden % heads:
        raise reader.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _marks(reader: Reader, count: int) -> list[str]:
    """Kind of each layer."""
    pattern, kinds, name = reader.get("hybrid_layer_pattern"), reader.get("layer_types"), "layer_types"
    if isinstance(pattern, list):
        marks, name = [SLIDING if mark == 1 else FULL for mark in pattern], "hybrid_layer_pattern"
    elif isinstance(kinds, list):
        switched_off = reader.get("use_sliding_window") is False
        marks = [FULL if switched_off and kind == "sliding_attention" else _MARKS[kind] for kind in kinds]
    else:
        marks = _marks_without_list(reader, count)
    if len(marks) != count:
        raise reader.error(name, f"it lists {len(marks)} layers but num_hidden_layers is {count}")
    if reader.model_type == "gemma4_text":
        marks[-1] = FULL  # as its configuration class forces it
    return marks


def _marks_without_list(reader: Reader, count: int) -> list[str]:
    """A window on every layer, unless the model's type or a field says which layers have none."""
    if reader.model_type == "llama4_text":
        return _llama4_marks(reader, count)
    if not reader.get("sliding_window") or reader.get("use_sliding_window") is False:  # 0 means none to vLLM
        return [FULL] * count
    every = reader.optional("sliding_window_pattern") or FULL_EVERY.get(reader.model_type)
    if every:
        return [SLIDING if (number + 1) % every else FULL for number in range(count)]
    first = reader.whole("max_window_layers")  # Qwen2's first layers have no window
    return [SLIDING if number >= first else FULL for number in range(count)]


def _llama4_marks(reader: Reader, count: int) -> list[str]:
    """Layers with RoPE attend within a chunk, the others to everything."""
    if not reader.get("attention_chunk_size"):
        return [FULL] * count
    layers = reader.get("no_rope_layers")
    if layers:
        if not isinstance(layers, list):
            raise reader.error("no_rope_layers", "it is no list")
        return [FULL if layer == 0 else CHUNKED for layer in layers]
    every = reader.integer("no_rope_layer_interval")
    return [CHUNKED if (number + 1) % every else FULL for number in range(count)]


def _refuse_what_is_not_modelled(reader: Reader, config: Mapping[str, Any]) -> None:
    if reader.model_type in REFUSED_TYPES:
        raise reader.error("model_type", f"{reader.model_type!r} is not supported, {REFUSED_TYPES[reader.model_type]}")
    for part in (config, reader.config):
        if part.get("is_encoder_decoder"):
            raise reader.error("is_encoder_decoder", "its cross-attention keeps KV of the encoder")
    for name, cause in _UNKNOWN_LAYOUTS.items():
        if reader.get(name) is not None:
            raise reader.error(name, cause)
    kinds = reader.get("layer_types")
    if isinstance(kinds, list):
        _check_layer_types(reader, kinds)
        return
    for name in _NOT_ATTENTION_FIELDS:
        if reader.get(name) is not None:
            raise reader.error(name, "it belongs to layers that keep a state that is not KV")


def _check_layer_types(reader: Reader, kinds: Sequence[Any]) -> None:
    for kind in kinds:
        if any(word in str(kind) for word in _NOT_ATTENTION):
            raise reader.error("layer_types", f"layers of type {shown(kind)} keep a state that is not KV")
        if not isinstance(kind, str) or (kind not in _MARKS and kind not in _MLA_LAYER_TYPES):
            raise reader.error("layer_types", f"layers of type {shown(kind)} are unknown")
    if reader.get("kv_lora_rank") is None and any(kind not in _MARKS for kind in kinds):
        raise reader.error("layer_types", "it names layers of sparse MLA, but there is no kv_lora_rank")


def shown(value: object) -> str:
    """A value of a config.json as one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class Reader:
    """Reads the fields of a language model, with the defaults of its type."""

    config: Mapping[str, Any]
    source: str
    model_type: str
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> Reader:
        """Reader of the language model that a config.json describes."""
        model_type = language_model_type(config)
        return cls(language_model(config), source, model_type, DEFAULTS.get(model_type, {}))

    def get(self, name: str) -> Any:
        """The value; the type's default where the field is left out, None where it is null."""
        return self.config[name] if name in self.config else self.defaults.get(name)

    def first(self, names: Sequence[str]) -> int:
        """The positive number under the first of these names that is there."""
        present = [name for name in names if self.get(name) is not None]
        return self.integer(present[0] if present else names[0])

    def integer(self, name: str) -> int:
        """A positive number."""
        return self._number(name, 1)

    def optional(self, name: str) -> int | None:
        """A positive number, or None."""
        return None if self.get(name) is None else self._number(name, 1)

    def whole(self, name: str, required: bool = False) -> int:
        """A number that may be 0, which it is where the field is left out."""
        return 0 if self.get(name) is None and not required else self._number(name, 0)

    def _number(self, name: str, least: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "positive whole number" if least else "whole number of 0 or more"
            raise self.error(name, f"it is {shown(value)}, not a {kind}")
        if value > _LARGEST:
            raise self.error(name, f"it is larger than {_LARGEST}")
        return value

    def error(self, name: str, cause: str) -> UsageError:
        """An error that names the file and the field."""
        return UsageError(
            f"reading the KV geometry from {self.source}, field {name}",
            cause,
            "Give a model whose config.json describes its attention layers.",
        )
