"""The identity of a deployment: every fact that decides whether stored KV may be reused, and their namespace.

LMCache's own key holds the token ids, the value of ``--model`` and the world size, nothing else
(lmcache 0.5.6, ``v1/distributed/l2_adapters/fs_native_l2_adapter.py`` and the connector). All other facts reach it
through the model path, whose last part is the namespace computed here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .envfile import Entry, parse, render
from .errors import UsageError
from .resolve import kv_scheme

IDENTITY_ENV = "identity.env.local"
NAMESPACE_PATTERN = re.compile(r"kvp-[0-9a-f]{32}\Z")
# A change to the meaning of a field or of the canonical form must change every namespace.
_SCHEMA = 1

# vLLM's CacheDType (vllm 0.32.0, vllm/config/cache.py) without `auto`, which is resolved, and without the lossy
# formats whose scales are computed at run time and are no part of any field here.
KV_CACHE_DTYPES = ("float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")
_MISSPELLED_DTYPES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "float8": "fp8", "e4m3": "fp8_e4m3"}

HEX40 = re.compile(r"[0-9a-f]{40}\Z")
HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_MAX_TEXT = 4096


@dataclass(frozen=True)
class Field:
    """How one field is called in identity.env.local and what it may hold."""

    env_name: str
    kind: str
    meaning: str


def _field(env_name: str, kind: str, meaning: str) -> Any:
    return dataclasses.field(metadata={"field": Field(env_name, kind, meaning)})


@dataclass(frozen=True)
class Identity:
    """All identity fields of one deployment, in their fixed order.

    Raises:
        UsageError: at construction, for an empty field or a value of the wrong form.
    """

    model_id: str = _field("KVP_MODEL_ID", "text", "Model id.")
    model_revision: str = _field("KVP_MODEL_REVISION", "hex40", "Revision, given or cut from the weights fingerprint.")
    weights_sha256: str = _field("KVP_WEIGHTS_SHA256", "hex64", "SHA-256 over names and SHA-256 of all weight shards.")
    tokenizer_name: str = _field("KVP_TOKENIZER_NAME", "text", "Tokenizer id.")
    tokenizer_revision: str = _field("KVP_TOKENIZER_REVISION", "hex40", "Tokenizer revision.")
    tokenizer_sha256: str = _field(
        "KVP_TOKENIZER_SHA256", "hex64", "SHA-256 over names and SHA-256 of the tokenizer files."
    )
    chat_template_sha256: str = _field("KVP_CHAT_TEMPLATE_DIGEST", "hex64", "SHA-256 of the chat template.")
    model_config_sha256: str = _field(
        "KVP_MODEL_CONFIG_SHA256",
        "hex64",
        "SHA-256 of config.json, less names and versions, and of the model's own code.",
    )
    model_dtype: str = _field("KVP_MODEL_DTYPE", "text", "Dtype of the model.")
    kv_cache_dtype: str = _field("KVP_KV_CACHE_DTYPE", "kv_dtype", "KV dtype as vLLM spells it, resolved.")
    kv_geometry: str = _field("KVP_KV_GEOMETRY", "text", "KV heads and dimensions of every layer.")
    rope: str = _field("KVP_ROPE", "text", "Position-encoding fields of config.json.")
    quantization: str = _field("KVP_QUANTIZATION", "text", "Quantization of config.json, or none.")
    block_size: int = _field("KVP_BLOCK_SIZE", "int", "Tokens per KV block.")
    chunk_size: int = _field("KVP_CHUNK_SIZE", "int", "Tokens per KV chunk.")
    max_model_len: int = _field("KVP_MAX_MODEL_LEN", "int", "Longest context in tokens.")
    tensor_parallel_size: int = _field("KVP_TENSOR_PARALLEL_SIZE", "int", "Tensor parallel size.")
    pipeline_parallel_size: int = _field("KVP_PIPELINE_PARALLEL_SIZE", "int", "Pipeline parallel size.")
    decode_context_parallel_size: int = _field(
        "KVP_DECODE_CONTEXT_PARALLEL_SIZE", "int", "Decode context parallel size."
    )
    enforce_eager: bool = _field("KVP_ENFORCE_EAGER", "bool", "Whether the engine runs without compiled graphs.")
    engine_flags: str = _field("KVP_ENGINE_FLAGS", "text", "Further engine arguments that may change the KV, or none.")
    object_groups: bool = _field("KVP_OBJECT_GROUPS", "bool", "Whether LMCache separates object groups.")
    hash_algorithm: str = _field("KVP_HASH_ALGORITHM", "text", "Hash of LMCache's chunk keys.")
    device: str = _field("KVP_DEVICE", "text", "What the engine computes on.")
    engine_build: str = _field("KVP_ENGINE_BUILD", "text", "vLLM distribution and version, or the image's digest.")
    lmcache_version: str = _field("KVP_LMCACHE_VERSION", "text", "LMCache version.")
    connector: str = _field("KVP_CONNECTOR", "text", "Module of the KV connector.")
    codec: str = _field("KVP_CODEC", "text", "Codec of the L2 tier.")
    l2_format: str = _field("KVP_L2_FORMAT", "text", "Format of the L2 tier's files.")

    def __post_init__(self) -> None:
        problems = [
            problem
            for name, field in FIELDS.items()
            for problem in [_problem(field, getattr(self, name))]
            if problem is not None
        ]
        if problems:
            raise UsageError("building the identity", "; ".join(problems), "Correct these values.")

    def canonical_json(self) -> str:
        """The text whose SHA-256 is the namespace: sorted keys, ASCII, no white space."""
        content: dict[str, Any] = {"schema": _SCHEMA}
        content.update(self.as_dict())
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def namespace(self) -> str:
        """``kvp-`` and the first 32 hex digits of SHA-256 over :meth:`canonical_json`."""
        return "kvp-" + hashlib.sha256(self.canonical_json().encode("ascii")).hexdigest()[:32]

    def as_dict(self) -> dict[str, Any]:
        """Fields by name, in their fixed order."""
        return {name: getattr(self, name) for name in FIELDS}

    def render(self) -> str:
        """The content of identity.env.local."""
        entries = []
        for name, field in FIELDS.items():
            value = getattr(self, name)
            text = str(int(value)) if isinstance(value, bool) else str(value)
            entries.append(Entry(field.env_name, text, (field.meaning,)))
        return render(entries, ("Identity of this deployment. Its namespace: kvpersist model-name",))


FIELDS: Mapping[str, Field] = {field.name: field.metadata["field"] for field in dataclasses.fields(Identity)}


def identity_from_env(text: str, source: str) -> Identity:
    """Reads identity.env.local.

    Raises:
        UsageError: naming ``source``, for a missing, empty or malformed field.
    """
    values = parse(text, source)
    missing = [field.env_name for field in FIELDS.values() if not values.get(field.env_name)]
    if missing:
        raise UsageError(
            f"reading {source}",
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing or empty",
            "Run the playbook with --tags identity to write the file again.",
        )
    typed: dict[str, Any] = {}
    for name, field in FIELDS.items():
        value = values[field.env_name]
        if field.kind in ("int", "bool"):
            if not re.match(r"[0-9]{1,12}\Z", value) or (field.kind == "bool" and value not in ("0", "1")):
                expected = "0 or 1" if field.kind == "bool" else "a whole number"
                raise UsageError(
                    f"reading {source}", f"{field.env_name} must be {expected}, not {value!r}", "Correct it."
                )
            typed[name] = bool(int(value)) if field.kind == "bool" else int(value)
        else:
            typed[name] = value
    try:
        return Identity(**typed)
    except UsageError as error:
        raise UsageError(f"reading {source}", error.cause, error.fix) from None


def differences(old: Identity, new: Identity) -> list[tuple[str, Any, Any]]:
    """Fields that differ, as (name, old value, new value), in field order."""
    before, after = old.as_dict(), new.as_dict()
    return [(name, before[name], after[name]) for name in FIELDS if before[name] != after[name]]


def resolve_kv_cache_dtype(given: str, model_dtype: str, quantization: Mapping[str, Any] | None) -> str:
    """What vLLM stores KV as.

    Args:
        given: the value of ``--kv-cache-dtype``.
        model_dtype: dtype of the model, from its config.json.
        quantization: ``quantization_config`` of config.json, or None.

    Raises:
        UsageError: for a spelling that vLLM does not accept, with the right one where it is known.

    ``auto`` is the KV scheme of the quantization if it names one (:func:`kv_scheme`), else the model's dtype.
    """
    doing = f"resolving the KV cache dtype {given!r}"
    if given == "auto":
        scheme = kv_scheme(quantization)
        given = scheme if scheme else model_dtype
    if given in KV_CACHE_DTYPES:
        return given
    right = _MISSPELLED_DTYPES.get(given)
    if right:
        raise UsageError(doing, f"vLLM does not accept {given!r}", f"Write {right}.")
    raise UsageError(doing, f"{given!r} is not supported", f"Use auto or one of {', '.join(KV_CACHE_DTYPES)}.")


def model_path(models_dir: str, family: str, namespace: str, longest: int) -> str:
    """The value of ``--model``: ``<models_dir>/<family>/<namespace>``.

    Args:
        longest: characters the L2 backend's file names leave for it, where each ``/`` may become five.

    Raises:
        UsageError: for a part that LMCache's adapters would confuse with their separators, or a path that is too long.
    """
    path = f"{models_dir.rstrip('/')}/{family}/{namespace}"
    doing = f"building the model path {path}"
    for separator in ("@", "--", "-SEP-"):
        if separator in path:
            raise UsageError(
                doing, f"LMCache uses {separator!r} as a separator in file names", "Choose names without it."
            )
    for what, name in (("family", family), ("namespace", namespace)):
        if not re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z", name):
            raise UsageError(
                doing,
                f"the {what} {name!r} is not one plain name",
                "Use letters, digits, '.', '_' and '-', e.g. mimo-pro.",
            )
    length = len(path) + 4 * path.count("/")
    if length > longest:
        raise UsageError(
            doing,
            f"it takes {length} characters in a file name of the L2 tier, where {longest} fit",
            "Set kvp_models_dir to a shorter path.",
        )
    return path


def _problem(field: Field, value: Any) -> str | None:
    name = field.env_name
    if field.kind == "int":
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if number else f"{name} must be a positive whole number, not {value!r}"
    if field.kind == "bool":
        return None if isinstance(value, bool) else f"{name} must be true or false, not {value!r}"
    if not isinstance(value, str) or not value:
        return f"{name} is empty"
    if field.kind == "hex40" and not HEX40.match(value):
        return f"{name} must be a full 40-hex SHA, not {value[:60]!r}"
    if field.kind == "hex64" and not HEX64.match(value):
        return f"{name} must be 64 hex, not {value[:70]!r}"
    if field.kind == "kv_dtype" and value not in KV_CACHE_DTYPES:
        return f"{name} must be one of {', '.join(KV_CACHE_DTYPES)}, not {value!r}"
    if len(value) > _MAX_TEXT or any(ord(character) < 32 for character in value):
        return f"{name} has a control character or more than {_MAX_TEXT} characters"
    return None
