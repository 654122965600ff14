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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .deployment import Engine
from .envfile import Entry, parse, render
from .errors import UsageError
from .resolve import kv_scheme
from .settings import Meaning

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


# How a field of one deployment came to be known.
GIVEN, DERIVED, ENGINE, IMAGE, FIXED = "given", "derived", "engine", "image", "fixed"
SOURCES: Mapping[str, str] = {
    GIVEN: "the inventory says so",
    DERIVED: "computed from the model's files",
    ENGINE: "read from the engine's environment",
    IMAGE: "the image's digest",
    FIXED: "the same in every deployment of this version of kvpersist",
}
# Holds `name=source` of every field in identity.env.local; no part of the namespace.
SOURCES_VARIABLE = "KVP_IDENTITY_SOURCES"

_VALUES = Meaning(
    "The model computes other KV for the same tokens.",
    "Модель вычисляет другой KV для тех же токенов.",
    "相同的 token 会算出不同的 KV。",
)
_LENGTH = Meaning(
    "RoPE scaling may follow the longest context, and KV with it.",
    "Масштабирование RoPE может зависеть от наибольшего контекста, а от него и KV.",
    "RoPE 缩放可能随最长上下文变化，KV 也随之变化。",
)
_TOKENS = Meaning(
    "The same text becomes other tokens, so stored chunks belong to other text.",
    "Тот же текст превращается в другие токены, и сохранённые фрагменты относятся к другому тексту.",
    "相同文本会变成不同 token，已存分块对应的是别的文本。",
)
_PROMPTS = Meaning(
    "The same conversation becomes another prompt.",
    "Тот же диалог превращается в другой запрос.",
    "同一段对话会变成不同的提示。",
)
_LAYOUT = Meaning(
    "KV of the same tokens is divided or ordered differently.",
    "KV тех же токенов иначе поделён или упорядочен.",
    "相同 token 的 KV 划分或排列方式不同。",
)
_BUILD = Meaning(
    "Other code may compute or order KV differently; nothing proves that it does not.",
    "Другой код может иначе вычислять или располагать KV; обратное ничем не доказано.",
    "不同的代码可能以不同方式计算或排列 KV，无法证明相同。",
)
_FILES = Meaning(
    "Files on disk are written or named differently.",
    "Файлы на диске иначе записываются или называются.",
    "磁盘文件的写法或命名不同。",
)
_NAME = Meaning(
    "By its name it is another model.",
    "Судя по имени, это другая модель.",
    "名称表明这是另一个模型。",
)


@dataclass(frozen=True)
class Field:
    """How one field is called in identity.env.local, what it may hold, and what a change of it means.

    Attributes:
        source: how it is known, where the settings do not say otherwise (see :func:`field_sources`).
        change: what a person changed when this field changed.
        effect: why KV of the other value is not reused.
        settings: the inventory's variables that lead to it; none where the model's files or the code do.
    """

    env_name: str
    kind: str
    meaning: str
    source: str
    change: Meaning
    effect: Meaning
    settings: tuple[str, ...] = ()


def _field(
    env_name: str, kind: str, meaning: str, source: str, change: tuple[str, str, str], effect: Meaning, *settings: str
) -> Any:
    field = Field(env_name, kind, meaning, source, Meaning(*change), effect, settings)
    return dataclasses.field(metadata={"field": field})


@dataclass(frozen=True)
class Identity:
    """All identity fields of one deployment, in their fixed order.

    Raises:
        UsageError: at construction, for an empty field or a value of the wrong form.
    """

    model_id: str = _field(
        "KVP_MODEL_ID",
        "text",
        "Model id.",
        GIVEN,
        ("Model id", "Идентификатор модели", "模型 id"),
        _NAME,
        "kvp_model_id",
    )
    model_revision: str = _field(
        "KVP_MODEL_REVISION",
        "hex40",
        "Revision, given or cut from the weights fingerprint.",
        DERIVED,
        ("Model revision", "Ревизия модели", "模型修订版"),
        _NAME,
        "kvp_model_revision",
    )
    weights_sha256: str = _field(
        "KVP_WEIGHTS_SHA256",
        "hex64",
        "SHA-256 over names and SHA-256 of all weight shards.",
        DERIVED,
        ("One byte of the weights", "Один байт весов", "权重中的任一字节"),
        _VALUES,
    )
    tokenizer_name: str = _field(
        "KVP_TOKENIZER_NAME",
        "text",
        "Tokenizer id.",
        GIVEN,
        ("Tokenizer id", "Идентификатор токенизатора", "分词器 id"),
        _NAME,
        "kvp_model_id",
    )
    tokenizer_revision: str = _field(
        "KVP_TOKENIZER_REVISION",
        "hex40",
        "Tokenizer revision.",
        DERIVED,
        ("Tokenizer revision", "Ревизия токенизатора", "分词器修订版"),
        _NAME,
        "kvp_model_revision",
    )
    tokenizer_sha256: str = _field(
        "KVP_TOKENIZER_SHA256",
        "hex64",
        "SHA-256 over names and SHA-256 of the tokenizer files.",
        DERIVED,
        ("Tokenizer files", "Файлы токенизатора", "分词器文件"),
        _TOKENS,
    )
    chat_template_sha256: str = _field(
        "KVP_CHAT_TEMPLATE_DIGEST",
        "hex64",
        "SHA-256 of the chat template.",
        DERIVED,
        ("Chat template", "Шаблон чата", "聊天模板"),
        _PROMPTS,
    )
    model_config_sha256: str = _field(
        "KVP_MODEL_CONFIG_SHA256",
        "hex64",
        "SHA-256 of config.json, less names and versions, and of the model's own code.",
        DERIVED,
        (
            "config.json or code in the model's folder",
            "config.json или код в папке модели",
            "config.json 或模型目录中的代码",
        ),
        _VALUES,
    )
    model_dtype: str = _field(
        "KVP_MODEL_DTYPE",
        "text",
        "Dtype of the model.",
        DERIVED,
        ("Dtype of the model", "Тип данных модели", "模型数据类型"),
        _VALUES,
    )
    kv_cache_dtype: str = _field(
        "KVP_KV_CACHE_DTYPE",
        "kv_dtype",
        "KV dtype as vLLM spells it, resolved.",
        DERIVED,
        ("KV cache dtype", "Тип данных KV-кэша", "KV 缓存数据类型"),
        _VALUES,
        "vllm_engine_kv_cache_dtype",
    )
    kv_cache_scales: str = _field(
        "KVP_KV_CACHE_SCALES",
        "text",
        "KV quantization that config.json names, or none; its scales are part of the weights.",
        DERIVED,
        ("KV quantization in config.json", "Квантование KV в config.json", "config.json 中的 KV 量化"),
        _VALUES,
    )
    kv_geometry: str = _field(
        "KVP_KV_GEOMETRY",
        "text",
        "KV heads and dimensions of every layer.",
        DERIVED,
        (
            "KV geometry: layers, KV heads, dimensions, windows",
            "Геометрия KV: слои, головы KV, размерности, окна",
            "KV 几何：层、KV 头、维度、窗口",
        ),
        _LAYOUT,
    )
    rope: str = _field(
        "KVP_ROPE",
        "text",
        "Position-encoding fields of config.json.",
        DERIVED,
        ("RoPE in config.json", "RoPE в config.json", "config.json 中的 RoPE"),
        _VALUES,
    )
    hf_overrides: str = _field(
        "KVP_HF_OVERRIDES",
        "text",
        "Engine arguments that override config.json, RoPE among them, or none.",
        GIVEN,
        (
            "RoPE or another override of config.json",
            "Переопределение RoPE или другого поля config.json",
            "覆盖 config.json（RoPE 等）",
        ),
        _VALUES,
        "vllm_engine_extra_args",
    )
    quantization: str = _field(
        "KVP_QUANTIZATION",
        "text",
        "Quantization of config.json, or none.",
        DERIVED,
        ("Quantization of the weights", "Квантование весов", "权重量化"),
        _VALUES,
    )
    block_size: int = _field(
        "KVP_BLOCK_SIZE",
        "int",
        "Tokens per KV block.",
        GIVEN,
        ("Block size", "Размер блока", "block size"),
        _LAYOUT,
        "vllm_engine_block_size",
    )
    chunk_size: int = _field(
        "KVP_CHUNK_SIZE",
        "int",
        "Tokens per KV chunk.",
        GIVEN,
        ("Chunk size", "Размер фрагмента", "分块大小"),
        _LAYOUT,
        "kvp_chunk_size",
    )
    max_model_len: int = _field(
        "KVP_MAX_MODEL_LEN",
        "int",
        "Longest context in tokens.",
        GIVEN,
        ("Longest context", "Наибольший контекст", "最长上下文"),
        _LENGTH,
        "vllm_engine_max_model_len",
    )
    tensor_parallel_size: int = _field(
        "KVP_TENSOR_PARALLEL_SIZE",
        "int",
        "Tensor parallel size.",
        GIVEN,
        ("Tensor parallel size", "Размер тензорного параллелизма", "张量并行大小"),
        _LAYOUT,
        "vllm_engine_tensor_parallel_size",
    )
    pipeline_parallel_size: int = _field(
        "KVP_PIPELINE_PARALLEL_SIZE",
        "int",
        "Pipeline parallel size.",
        GIVEN,
        ("Pipeline parallel size", "Размер конвейерного параллелизма", "流水线并行大小"),
        _LAYOUT,
        "vllm_engine_extra_args",
    )
    decode_context_parallel_size: int = _field(
        "KVP_DECODE_CONTEXT_PARALLEL_SIZE",
        "int",
        "Decode context parallel size.",
        GIVEN,
        ("Decode context parallel size", "Размер контекстного параллелизма декодирования", "解码上下文并行大小"),
        _LAYOUT,
        "vllm_engine_extra_args",
    )
    attention_backend: str = _field(
        "KVP_ATTENTION_BACKEND",
        "text",
        "Attention backend where the engine arguments pin one, or none.",
        GIVEN,
        ("Attention backend, where it is pinned", "Закреплённая реализация внимания", "固定的注意力后端"),
        _LAYOUT,
        "vllm_engine_extra_args",
    )
    speculative_config: str = _field(
        "KVP_SPECULATIVE_CONFIG",
        "text",
        "Speculative decoding (MTP among it) of the engine arguments, or none.",
        GIVEN,
        ("Speculative decoding, MTP", "Спекулятивное декодирование, MTP", "推测解码、MTP"),
        _LAYOUT,
        "vllm_engine_extra_args",
    )
    enforce_eager: bool = _field(
        "KVP_ENFORCE_EAGER",
        "bool",
        "Whether the engine runs without compiled graphs.",
        GIVEN,
        (
            "Compiled graphs on or off (enforce-eager)",
            "Скомпилированные графы включены или нет (enforce-eager)",
            "编译图开关（enforce-eager）",
        ),
        _BUILD,
        "vllm_engine_enforce_eager",
    )
    engine_flags: str = _field(
        "KVP_ENGINE_FLAGS",
        "text",
        "Further engine arguments that may change the KV, or none.",
        GIVEN,
        (
            "Any other engine argument that is not known to leave KV alone",
            "Любой другой аргумент движка, о котором неизвестно, что он не влияет на KV",
            "任何未知是否影响 KV 的其他引擎参数",
        ),
        _BUILD,
        "vllm_engine_extra_args",
    )
    object_groups: bool = _field(
        "KVP_OBJECT_GROUPS",
        "bool",
        "Whether LMCache separates object groups.",
        FIXED,
        ("Separate object groups in LMCache", "Раздельные группы объектов в LMCache", "LMCache 对象分组"),
        _FILES,
    )
    hash_algorithm: str = _field(
        "KVP_HASH_ALGORITHM",
        "text",
        "Hash of LMCache's chunk keys.",
        FIXED,
        ("Hash of chunk keys", "Хеш ключей фрагментов", "分块键的哈希算法"),
        _FILES,
    )
    device: str = _field(
        "KVP_DEVICE",
        "text",
        "What the engine computes on.",
        GIVEN,
        ("Device: GPU or CPU", "Устройство: GPU или CPU", "设备：GPU 或 CPU"),
        _BUILD,
        "kvp_device",
    )
    engine_build: str = _field(
        "KVP_ENGINE_BUILD",
        "text",
        "vLLM distribution and version, or the image's digest.",
        ENGINE,
        ("vLLM build or image digest", "Сборка vLLM или дайджест образа", "vLLM 构建版本或镜像 digest"),
        _BUILD,
        "kvp_launch_mode",
        "vllm_engine_image",
    )
    lmcache_version: str = _field(
        "KVP_LMCACHE_VERSION",
        "text",
        "LMCache version.",
        ENGINE,
        ("LMCache version or image digest", "Версия LMCache или дайджест образа", "LMCache 版本或镜像 digest"),
        _BUILD,
        "kvp_launch_mode",
        "cache_server_image",
    )
    connector: str = _field(
        "KVP_CONNECTOR",
        "text",
        "Module of the KV connector.",
        FIXED,
        ("KV connector", "Коннектор KV", "KV 连接器"),
        _BUILD,
    )
    codec: str = _field(
        "KVP_CODEC",
        "text",
        "Codec of the L2 tier.",
        GIVEN,
        ("Codec of the disk tier", "Кодек дискового уровня", "磁盘层编解码"),
        _FILES,
        "kvp_codec",
    )
    l2_format: str = _field(
        "KVP_L2_FORMAT",
        "text",
        "Format of the L2 tier's files.",
        GIVEN,
        (
            "Adapter of the disk tier, or its file format",
            "Адаптер дискового уровня или формат его файлов",
            "磁盘层适配器或其文件格式",
        ),
        _FILES,
        "cache_server_l2_backend",
    )

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

    def render(self, sources: Mapping[str, str]) -> str:
        """The content of identity.env.local.

        Args:
            sources: how each field is known, as :func:`field_sources` returns it.
        """
        entries = []
        for name, field in FIELDS.items():
            value = getattr(self, name)
            text = str(int(value)) if isinstance(value, bool) else str(value)
            entries.append(Entry(field.env_name, text, (field.meaning,)))
        known = " ".join(f"{name}={sources[name]}" for name in FIELDS)
        entries.append(Entry(SOURCES_VARIABLE, known, ("How each field is known; no part of the namespace.",)))
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


def sources_from_env(text: str, source: str) -> dict[str, str]:
    """How each field of an identity.env.local is known; empty for a file that does not say so."""
    words = parse(text, source).get(SOURCES_VARIABLE, "").split()
    pairs = (word.partition("=") for word in words)
    return {name: known for name, _, known in pairs if name in FIELDS and known in SOURCES}


def field_sources(engine: Engine) -> dict[str, str]:
    """How each field of a deployment's identity is known, one of :data:`SOURCES` by name."""
    sources = {name: field.source for name, field in FIELDS.items()}
    if engine.model_revision:
        sources.update(model_revision=GIVEN, tokenizer_revision=GIVEN)
    if engine.kv_cache_dtype != "auto":
        sources["kv_cache_dtype"] = GIVEN
    if engine.launch_mode == "docker":
        sources.update(engine_build=IMAGE, lmcache_version=IMAGE)
    return sources


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


def kv_cache_scales(quantization: Mapping[str, Any] | None) -> str:
    """What config.json says about the quantization of KV, as canonical text; ``none`` where it says nothing.

    The scales themselves are tensors among the weights (compressed-tensors ``kv_cache_scheme``, ModelOpt
    ``kv_cache_quant_algo``).
    """
    names = ("kv_cache_quant_algo", "kv_cache_scheme")
    found = {name: quantization[name] for name in names if quantization and quantization.get(name)}
    return json.dumps(found, sort_keys=True, separators=(",", ":")) if found else "none"


def model_path(models_dir: str, family: str, namespace: str, longest: int, spell: Callable[[str], str] = str) -> str:
    """The value of ``--model``: ``<models_dir>/<family>/<namespace>``.

    Args:
        longest: bytes that the L2 backend's names leave for it.
        spell: how these names write it.

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
    length = len(spell(path).encode())
    if length > longest:
        raise UsageError(
            doing,
            f"it takes {length} bytes in a name of the L2 tier, where {longest} fit",
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
    # JSON writes a pair of lone surrogates like the one character they would make: two values, one canonical form.
    if len(value) > _MAX_TEXT or any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in value):
        return f"{name} has a control character, a lone surrogate or more than {_MAX_TEXT} characters"
    return None
