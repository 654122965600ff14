"""What differs between two identities, what that means, and what becomes of the KV stored under the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .engine_args import HARMLESS as HARMLESS_ARGS
from .engine_args import UNCOVERED
from .identity import FIELDS
from .settings import Meaning


@dataclass(frozen=True)
class Named:
    """One identity, wherever it comes from.

    Attributes:
        namespace: under which its KV is stored.
        model_path: the value of ``--model`` with it.
        fields: its values by name; one of an earlier version may lack some.
    """

    namespace: str
    model_path: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """What a cache root holds under one namespace.

    Attributes:
        bytes: of all its objects together.
        remove: the command that removes exactly them.
    """

    objects: int
    bytes: int
    remove: str


@dataclass(frozen=True)
class Explanation:
    """The difference between two identities.

    Attributes:
        changes: fields that differ, as (name, old value, new value); None where an identity lacks the field.
        stored: what is stored under the old one; None where that could not be counted.
    """

    old: Named
    new: Named
    changes: tuple[tuple[str, Any, Any], ...]
    stored: Stored | None

    @property
    def reusable(self) -> bool:
        """Whether KV that was stored under the old identity is found under the new one."""
        return self.old.namespace == self.new.namespace

    def lines(self) -> list[str]:
        """What a person reads."""
        if self.reusable and not self.changes:
            return [f"Both are {self.new.namespace}: stored KV is reused."]
        if self.reusable:
            first = f"Both are stored as {self.new.namespace}, by KV_PERSIST_NAMESPACE: nothing keeps their KV apart."
            return [first, *self._change_lines()]
        first = f"{self.old.namespace} -> {self.new.namespace}: KV stored so far is not reused."
        return [first, *self._change_lines(), *self._stored_lines()]

    def as_dict(self) -> dict[str, Any]:
        """The keys that the module returns and ``--json`` prints."""
        stored = self.stored
        return {
            "old": self.old.namespace,
            "new": self.new.namespace,
            "reusable": self.reusable,
            "changes": [
                {
                    "name": name,
                    "old": old,
                    "new": new,
                    "change": FIELDS[name].change.en,
                    "effect": FIELDS[name].effect.en,
                }
                for name, old, new in self.changes
            ],
            "stored": {"objects": stored.objects, "bytes": stored.bytes, "remove": stored.remove} if stored else None,
            "lines": self.lines(),
        }

    def _change_lines(self) -> Iterable[str]:
        for name, old, new in self.changes:
            field = FIELDS[name]
            yield f"{name}: {_shown(old)} -> {_shown(new)}. {field.meaning} {field.effect.en}"

    def _stored_lines(self) -> Iterable[str]:
        if self.stored is None:
            yield f"What {self.old.namespace} keeps on disk could not be counted."
        elif not self.stored.objects:
            yield f"{self.old.namespace} keeps nothing on disk."
        else:
            yield (
                f"{self.old.namespace} keeps {self.stored.objects} objects, {self.stored.bytes / 1e9:.3f} GB, out of "
                "reach from here. They stay until eviction needs their room."
            )
            yield f"To use them again: ansible-playbook playbooks/rollback.yml -e kvp_rollback_to={self.old.namespace}"
            yield f"To remove them now: {self.stored.remove}"


def explain(old: Named, new: Named, stored: Stored | None) -> Explanation:
    """Compares two identities, field by field in the fields' order.

    Args:
        stored: what is stored under the old one.
    """
    pairs = ((name, old.fields.get(name), new.fields.get(name)) for name in FIELDS)
    return Explanation(old, new, tuple(pair for pair in pairs if pair[1] != pair[2]), stored)


def _shown(value: Any) -> str:
    return "not recorded" if value is None else repr(value)


@dataclass(frozen=True)
class Other:
    """Something that is no part of the identity: what a person changed, and whether KV is found afterwards."""

    change: Meaning
    reusable: Meaning
    settings: tuple[str, ...] = ()


_YES = Meaning("yes", "да", "可以")

OTHERS: tuple[Other, ...] = (
    Other(
        Meaning("Name, address or port of the API", "Имя модели, адрес или порт API", "API 的模型名、地址或端口"),
        _YES,
        ("vllm_engine_served_model_name", "vllm_engine_host", "vllm_engine_port"),
    ),
    Other(
        Meaning("Address or ports of the cache server", "Адрес или порты сервера кэша", "缓存服务器的地址或端口"),
        _YES,
        ("kvp_cache_host", "kvp_cache_port", "kvp_cache_http_port"),
    ),
    Other(
        Meaning(
            "Disk budget, floor and eviction", "Бюджет диска, запас места и вытеснение", "磁盘预算、保留空间与淘汰"
        ),
        _YES,
        (
            "kvp_cache_budget_gb",
            "kvp_cache_min_free_gb",
            "cache_server_evict_trigger_watermark",
            "cache_server_evict_ratio",
        ),
    ),
    Other(
        Meaning("Memory of L1, engine and KV", "Память L1, движка и KV", "L1、引擎与 KV 的内存"),
        _YES,
        ("cache_server_l1_size_gb", "vllm_engine_gpu_memory_utilization", "vllm_engine_cpu_kvcache_space_gb"),
    ),
    Other(
        Meaning(
            "Weights in host memory: variant and amount",
            "Веса в памяти хоста: вариант и объём",
            "主机内存中的权重：变体与数量",
        ),
        _YES,
        ("vllm_engine_variant", "vllm_engine_cpu_offload_gb"),
    ),
    Other(
        Meaning("Requests at the same time", "Число одновременных запросов", "同时处理的请求数"),
        _YES,
        ("vllm_engine_max_num_seqs",),
    ),
    Other(
        Meaning(
            "Place and times of the model's files, with the same bytes in them",
            "Место и время файлов модели при тех же байтах",
            "模型文件的位置与时间（字节相同）",
        ),
        _YES,
        ("kvp_model_dir",),
    ),
    Other(
        Meaning(
            "Place of the virtual environments, with the same versions in them",
            "Место виртуальных окружений при тех же версиях",
            "虚拟环境的位置（版本相同）",
        ),
        _YES,
        ("vllm_engine_venv", "cache_server_venv"),
    ),
    Other(
        Meaning(
            "Folders of kvpersist, service manager", "Папки kvpersist, менеджер служб", "kvpersist 的目录、服务管理器"
        ),
        _YES,
        ("kvp_home", "kvp_config_dir", "kvp_state_dir", "kvp_log_dir", "kvp_service_manager"),
    ),
    Other(
        Meaning(
            "Log level, device of the evidence", "Уровень журнала, устройство для доказательств", "日志级别、取证设备"
        ),
        _YES,
        ("cache_server_log_level", "kvp_cache_device"),
    ),
    Other(
        Meaning(
            "Comments in the environment files, order of their lines",
            "Комментарии в файлах окружения, порядок строк",
            "环境文件中的注释与行序",
        ),
        _YES,
    ),
    Other(
        Meaning("Cache off and on again", "Кэш выключен и снова включён", "关闭缓存后再打开"),
        _YES,
        ("vllm_engine_kv_persist",),
    ),
    Other(
        Meaning("Path before the namespace", "Путь перед пространством имён", "命名空间之前的路径"),
        Meaning(
            "yes; with fs_native no, its keys hold the whole path",
            "да; с fs_native нет: его ключи содержат весь путь",
            "可以；fs_native 不行，其键包含完整路径",
        ),
        ("kvp_models_dir", "kvp_model_family"),
    ),
    Other(
        Meaning("Folder of the disk tier", "Папка дискового уровня", "磁盘层目录"),
        Meaning("yes, when its content is moved along", "да, если содержимое перенесено", "可以，须一并移动内容"),
        ("kvp_cache_root",),
    ),
    Other(
        Meaning("Namespace given by hand", "Пространство имён задано вручную", "手动指定的命名空间"),
        Meaning(
            "as you say: KV of that name is used, whatever it belongs to",
            "как вы скажете: берётся KV с этим именем, чьим бы он ни был",
            "由您决定：直接使用该名称下的 KV",
        ),
        ("vllm_engine_namespace",),
    ),
)

_NO = Meaning("no", "нет", "不可以")
_REFUSED = Meaning(
    "refused: what they bring in would be no part of the identity",
    "отклоняются: принесённое ими не вошло бы в идентичность",
    "拒绝：其引入的内容不属于身份",
)
_ARGUMENTS = Meaning("Engine arguments", "Аргументы движка", "引擎参数")


def identity_rows(language: str) -> Iterable[tuple[str, str, str, str, str]]:
    """Rows of the table of what is part of the identity: change, field, settings, reusable, why."""
    for field in FIELDS.values():
        settings = ", ".join(f"`{name}`" for name in field.settings)
        yield (
            field.change.text(language),
            f"`{field.env_name}`",
            settings,
            _NO.text(language),
            field.effect.text(language),
        )


def other_rows(language: str) -> Iterable[tuple[str, str, str]]:
    """Rows of the table of what is no part of the identity: change, settings, reusable."""
    for other in OTHERS:
        settings = ", ".join(f"`{name}`" for name in other.settings)
        yield other.change.text(language), settings, other.reusable.text(language)
    for names, answer in ((HARMLESS_ARGS, _YES), (UNCOVERED, _REFUSED)):
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        yield f"{_ARGUMENTS.text(language)} {listed}", "`vllm_engine_extra_args`", answer.text(language)
