"""Reference pages and example files generated from the declarations of settings and identity."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ..core.explain import identity_rows, other_rows
from ..core.settings import ENGINE_ENV, LANGUAGES, documentation, render_example
from ..host.files import write_atomic

_TITLES = {"en": "Configuration", "ru": "Настройки", "zh": "配置"}
_INTRODUCTIONS = {
    "en": "Every variable of a deployment. Set them in your inventory; the playbook renders them into the files named "
    "here. Names that start with `kvp_`, `cache_server_` or `vllm_engine_` belong to this project: one that it does "
    "not know is an error in preflight. This page is generated: `make docs`.",
    "ru": "Все переменные развёртывания. Задаются в инвентаре; плейбук записывает их в указанные файлы. Имена, которые "
    "начинаются с `kvp_`, `cache_server_` или `vllm_engine_`, принадлежат проекту: неизвестное имя — ошибка проверки "
    "preflight. Страница создаётся командой `make docs`.",
    "zh": "部署的全部变量。在清单中设置；playbook 会将其渲染到所列文件中。以 `kvp_`、`cache_server_` 或 `vllm_engine_` "
    "开头的名称属于本项目：未知的名称会使 preflight 报错。本页由 `make docs` 生成。",
}
_HEADINGS = {
    "en": ("Variable", "Type", "Default", "In files", "Meaning"),
    "ru": ("Переменная", "Тип", "По умолчанию", "В файлах", "Значение"),
    "zh": ("变量", "类型", "默认值", "所在文件", "含义"),
}

_REUSE_TITLES = {
    "en": "What you changed: is the stored KV reusable?",
    "ru": "Что вы изменили: пригоден ли сохранённый KV?",
    "zh": "您改了什么：已存的 KV 还能复用吗？",
}
_REUSE_INTRODUCTIONS = {
    "en": "Stored KV is found again under the same namespace only. `kvpersist identity explain A B` names what differs "
    "between two identities, how much is stored under the first, and how to use or remove it. A test really makes each "
    "of these changes. This page is generated: `make docs`.",
    "ru": "Сохранённый KV находится только под тем же пространством имён. `kvpersist identity explain A B` называет "
    "различия двух идентичностей, объём сохранённого под первой и способ использовать или удалить его. Каждое из этих "
    "изменений действительно проверяется тестом. Страница создаётся командой `make docs`.",
    "zh": "只有命名空间相同，才能再次找到已存的 KV。`kvpersist identity explain A B` 会列出两个身份的差异、"
    "前者已存数据量，以及如何使用或删除。每一行都有测试实际执行该改动。本页由 `make docs` 生成。",
}
_PART = {
    "en": ("Part of the identity", ("You changed", "Field", "Variable", "Reusable?", "Why")),
    "ru": ("Входит в идентичность", ("Вы изменили", "Поле", "Переменная", "Пригоден?", "Почему")),
    "zh": ("属于身份", ("您改了", "字段", "变量", "可复用？", "原因")),
}
_NO_PART = {
    "en": ("No part of the identity", ("You changed", "Variable", "Reusable?")),
    "ru": ("Не входит в идентичность", ("Вы изменили", "Переменная", "Пригоден?")),
    "zh": ("不属于身份", ("您改了", "变量", "可复用？")),
}


def write_docs(folder: str) -> list[str]:
    """Writes ``configuration.md``, ``reuse.md`` and ``tp4.env.example`` with their translations; returns the paths."""
    written = []
    for language in LANGUAGES:
        suffix = "" if language == "en" else f".{language}"
        for name, content in (
            (f"configuration{suffix}.md", "\n".join(_configuration(language)) + "\n"),
            (f"reuse{suffix}.md", "\n".join(_reuse(language)) + "\n"),
            (f"{ENGINE_ENV}.example{suffix}", render_example(ENGINE_ENV, language)),
        ):
            path = os.path.join(os.path.abspath(folder), name)
            write_atomic(path, content, 0o644)
            written.append(path)
    return written


def _configuration(language: str) -> Iterable[str]:
    yield from (f"# {_TITLES[language]}", "", _INTRODUCTIONS[language], "")
    yield from _table(
        _HEADINGS[language],
        (
            (f"`{variable}`", kind, f"`{default}`" if default else "", names, meaning)
            for variable, kind, default, names, meaning in documentation(language)
        ),
    )


def _reuse(language: str) -> Iterable[str]:
    yield from (f"# {_REUSE_TITLES[language]}", "", _REUSE_INTRODUCTIONS[language])
    for (title, headings), rows in ((_PART[language], identity_rows), (_NO_PART[language], other_rows)):
        yield from ("", f"## {title}", "")
        yield from _table(headings, rows(language))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield _row(headings)
    yield _row(["---"] * len(headings))
    for cells in rows:
        yield _row(cells)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
