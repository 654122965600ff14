"""A model's folder on disk: config, weights, tokenizer, chat template, reduced to what the identity needs."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.deployment import Deployment
from ..core.engine_args import parse_options, positive_option
from ..core.errors import UsageError
from ..core.geometry import Geometry, geometry_from_config, language_model, rope_text
from ..core.identity import resolve_kv_cache_dtype
from ..core.resolve import EngineShape, kv_quantization, model_dtype, shape_problems
from .files import read_json, read_text, reason
from .hashing import HashCache, Progress, sha256_files
from .huggingface import read_download

# In the order in which vLLM prefers them; one kind is loaded, the others are ignored.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
# transformers: model.safetensors.index.json, pytorch_model.bin.index.json.
_INDEX_STEMS = ("model", "pytorch_model")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
)
# Where a config.json came from and which release wrote it; everything else in it may change the KV.
_HARMLESS_CONFIG = ("_name_or_path", "transformers_version")
# Of safetensors' format; a longer one is damage.
_LONGEST_HEADER = 100_000_000
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelFacts:
    """What a model folder contributes to the identity; the fields are named as there.

    Attributes:
        commit: the commit of the download from Hugging Face that all shards name, if any.
    """

    model_config_sha256: str
    model_dtype: str
    kv_geometry: str
    rope: str
    quantization: str
    quantization_config: Mapping[str, Any] | None
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    commit: str | None = None

    @property
    def model_revision(self) -> str:
        """The commit of the download, else the beginning of the weights fingerprint."""
        return self.commit or self.weights_sha256[:40]


def read_model(folder: str, cache: HashCache, progress: Progress | None = None) -> ModelFacts:
    """Reads and hashes a model folder.

    Raises:
        UsageError: for a missing folder, a config.json that is no JSON, missing weights, shards or tokenizer, and as
            :func:`hash_model`.
    """
    if not os.path.isdir(folder):
        raise UsageError(
            f"reading the model folder {folder}", "it is not a folder", "Set kvp_model_dir to the model's folder."
        )
    config = read_json(f"{folder}/config.json")
    geometry = geometry_from_config(config, f"{folder}/config.json")
    tokenizer = tokenizer_files(folder)
    shards = weight_shards(folder)
    code = _code_files(folder)
    digests = hash_model(folder, cache, progress)
    beside = _quantization_beside(folder)
    quantization = config.get("quantization_config") or language_model(config).get("quantization_config") or beside
    return ModelFacts(
        model_config_sha256=_config_digest(config, digests, code),
        model_dtype=_dtype(config, folder, shards),
        kv_geometry=geometry.text(),
        rope=rope_text(config),
        quantization=_quantization_text(quantization),
        quantization_config=kv_quantization(config, geometry.is_mla, beside),
        weights_sha256=_fingerprint(shards, digests),
        tokenizer_sha256=_fingerprint(tokenizer, digests),
        chat_template_sha256=hashlib.sha256(_chat_template(folder)).hexdigest(),
        commit=read_download(folder, shards).commit,
    )


def hash_model(folder: str, cache: HashCache, progress: Progress | None = None) -> dict[str, str]:
    """SHA-256 by name of the files of a model folder that decide about the KV, checked against their download.

    Raises:
        UsageError: for missing weights, shards or tokenizer; naming a file that cannot be read, that changed while it
            was read, or whose SHA-256 is not the one that its download expected.
    """
    names = [*weight_shards(folder), *tokenizer_files(folder), *_code_files(folder)]
    expected = read_download(folder, names).expected
    found = sha256_files([f"{folder}/{name}" for name in names], cache, progress)
    digests = {name: found[f"{folder}/{name}"] for name in names}
    wrong = [name for name in names if digests[name] != expected.get(name, digests[name])]
    if wrong:
        facts = "; ".join(
            f"{name} has SHA-256 {digests[name]}, its download expected {expected[name]}" for name in wrong
        )
        raise UsageError(
            f"checking the model folder {folder}",
            facts,
            "Remove what is named and download it again; a model that was changed on purpose belongs into a folder "
            "without Hugging Face's metadata.",
        )
    return digests


def _code_files(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".py"))


def tokenizer_files(folder: str) -> list[str]:
    """Names of the tokenizer's files in a model folder.

    Raises:
        UsageError: when none of them holds a vocabulary.
    """
    names = [name for name in _TOKENIZER_FILES if os.path.isfile(f"{folder}/{name}")]
    if not set(names) & set(_TOKENIZERS):
        raise UsageError(
            f"reading the tokenizer in {folder}",
            f"none of {', '.join(_TOKENIZERS)} is there",
            "Copy the tokenizer files of the model into its folder.",
        )
    return names


def weight_shards(folder: str) -> list[str]:
    """Names of the weight shards in a model folder, sorted.

    Raises:
        UsageError: when there is none, or one that the index names is missing.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UsageError(f"reading the model folder {folder}", reason(error), "Check its permissions.") from None
    for suffix in _WEIGHT_SUFFIXES:
        shards = [name for name in names if name.endswith(suffix) and os.path.isfile(f"{folder}/{name}")]
        if not shards:
            continue
        for stem in _INDEX_STEMS:
            index = f"{folder}/{stem}{suffix}.index.json"
            if os.path.exists(index):
                _check_index(index, shards)
        return shards
    raise UsageError(
        f"reading the weights in {folder}",
        f"no file ends in {', '.join(_WEIGHT_SUFFIXES)}",
        "Copy the model's weights into its folder.",
    )


def _check_index(index: str, shards: Sequence[str]) -> None:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UsageError(f"reading {index}", "it has no weight_map", "Copy the file again from its source.")
    missing = sorted({str(name) for name in weight_map.values()} - set(shards))
    if missing:
        raise UsageError(
            f"reading {index}", f"shard {missing[0]} is not in the folder", "Finish the download of the model."
        )


def _fingerprint(names: Sequence[str], digests: Mapping[str, str]) -> str:
    content = json.dumps([[name, digests[name]] for name in sorted(names)], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def kv_cache_dtype(config: Mapping[str, Any], geometry: Geometry, folder: str, given: str) -> str:
    """What vLLM stores this model's KV as.

    Raises:
        UsageError: when that cannot be resolved.
    """
    quantization = kv_quantization(config, geometry.is_mla, _quantization_beside(folder))
    return resolve_kv_cache_dtype(given, _dtype(config, folder, weight_shards(folder)), quantization)


def check_model(deployment: Deployment) -> list[str]:
    """What keeps vLLM from serving the model folder as the settings ask, each a line with what to do about it.

    Raises:
        UsageError: where the folder cannot be read or its KV geometry cannot be told.
    """
    engine = deployment.engine
    folder, source = engine.model_dir, f"{engine.model_dir}/config.json"
    config = read_json(source)
    geometry = geometry_from_config(config, source)
    tokenizer_files(folder)
    kv_cache_dtype(config, geometry, folder, engine.kv_cache_dtype)
    options = parse_options(engine.extra_args)
    shape = EngineShape(
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=positive_option(options, "--pipeline-parallel-size"),
        decode_context_parallel_size=positive_option(options, "--decode-context-parallel-size"),
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
        device=engine.device,
        options=options,
    )
    return shape_problems(config, geometry, shape, source)


def _quantization_beside(folder: str) -> dict[str, Any] | None:
    """What ModelOpt up to 0.29 writes beside config.json instead of into it."""
    path = f"{folder}/hf_quant_config.json"
    return read_json(path) if os.path.isfile(path) else None


def _config_digest(config: Mapping[str, Any], digests: Mapping[str, str], code: Sequence[str]) -> str:
    """Digest of everything in config.json that may change what the model computes, and of the code it brings along."""
    content = {name: value for name, value in config.items() if name not in _HARMLESS_CONFIG}
    canonical = json.dumps([content, [[name, digests[name]] for name in code]], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _dtype(config: Mapping[str, Any], folder: str, shards: Sequence[str]) -> str:
    try:
        return model_dtype(config)
    except LookupError:
        stored = [code for shard in shards if shard.endswith(".safetensors") for code in _dtypes(f"{folder}/{shard}")]
        return model_dtype(config, stored)


def _dtypes(path: str) -> set[str]:
    """Dtypes in the header of a safetensors file: its length in 8 bytes, then JSON."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        return {str(tensor["dtype"]) for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, struct.error, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        cause = reason(error) if isinstance(error, OSError) else f"its header cannot be read ({error})"
        raise UsageError(f"reading {path}", cause, "Copy the file again from its source.") from None


def _quantization_text(quantization: Any) -> str:
    if not quantization:
        return "none"
    canonical = json.dumps(quantization, sort_keys=True, separators=(",", ":"))
    method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "unnamed"
    return f"{method} sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _chat_template(folder: str) -> bytes:
    """The bytes whose SHA-256 is the chat-template digest.

    chat_template.jinja as it is; else ``chat_template`` of chat_template.json or tokenizer_config.json in UTF-8, a list
    of named templates as JSON with sorted keys; nothing for a model without a template.
    """
    if os.path.isfile(f"{folder}/chat_template.jinja"):
        return read_text(f"{folder}/chat_template.jinja").encode()
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(f"{folder}/{name}").get("chat_template") if os.path.isfile(f"{folder}/{name}") else None
        if template:
            text = (
                template if isinstance(template, str) else json.dumps(template, sort_keys=True, separators=(",", ":"))
            )
            return text.encode()
    return b""
