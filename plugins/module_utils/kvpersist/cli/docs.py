"""Reference pages generated from the declaration of the settings."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..core.settings import LANGUAGES, documentation
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


def write_docs(folder: str) -> list[str]:
    """Writes ``configuration.md`` and its translations; returns the paths."""
    written = []
    for language in LANGUAGES:
        name = "configuration.md" if language == "en" else f"configuration.{language}.md"
        path = os.path.join(os.path.abspath(folder), name)
        write_atomic(path, "\n".join(_page(language)) + "\n", 0o644)
        written.append(path)
    return written


def _page(language: str) -> Iterable[str]:
    yield f"# {_TITLES[language]}"
    yield ""
    yield _INTRODUCTIONS[language]
    yield ""
    yield _row(_HEADINGS[language])
    yield _row(["---"] * 5)
    for variable, kind, default, names, meaning in documentation(language):
        yield _row([f"`{variable}`", kind, f"`{default}`" if default else "", names, meaning])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
