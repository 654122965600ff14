"""Who may import whom (DESIGN: the house). Each rule is also shown to fail when it is broken."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins" / "module_utils" / "kvpersist"
LIBRARY = ROOT / "library"
# Rooms that each room of the package may import from; "" is the package itself (its version).
MAY_ENTER = {"core": {"core"}, "host": {"host", "core"}, "cli": {"cli", "host", "core", ""}, "": set()}
# Shipped to hosts by AnsiballZ: the standard library only, and a grammar that their Pythons know.
SHIPPED = ("core", "host", "")
TARGET_GRAMMAR = (3, 9)
LIBRARY_MAY_IMPORT = ("ansible.module_utils.kvpersist.core.", "ansible.module_utils.kvpersist.host.")


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str, int]]:
    """Level, dotted name and line of everything that is imported, lazily or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.level, ".".join(part for part in (node.module, alias.name) if part), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("__import__", "import_module"):
            yield 0, "<at run time>", node.lineno


def room_violations(package: Path) -> list[str]:
    """What breaks the rules in one copy of the package."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        folders = relative.parts[:-1]
        room = folders[0] if folders else ""
        if room not in MAY_ENTER:
            found.append(f"{relative}: {room} is no room")
            continue
        for level, name, line in imports_of(ast.parse(path.read_text("utf-8"))):
            where = f"{relative}:{line}"
            if path.name == "__init__.py":
                found.append(f"{where}: an __init__.py imports {name}")
            elif level:
                found.extend(_relative(where, room, folders, level, name))
            else:
                found.extend(_absolute(where, room, name))
    return found


def _relative(where: str, room: str, folders: tuple[str, ...], level: int, name: str) -> list[str]:
    if level - 1 > len(folders):
        return [f"{where}: leaves the package"]
    target = [*folders[: len(folders) - (level - 1)], *name.split(".")]
    entered = target[0] if target[0] in MAY_ENTER else ""
    return [] if entered in MAY_ENTER[room] else [f"{where}: {room or 'the package'} enters {'.'.join(target)}"]


def _absolute(where: str, room: str, name: str) -> list[str]:
    top = name.split(".")[0]
    if top in ("kvpersist", "ansible", "runtime", "library"):
        return [f"{where}: {name} is not imported relatively"]
    if room in SHIPPED and top not in sys.stdlib_module_names:
        return [f"{where}: {room or 'the package'} imports {name}, which is not in the standard library"]
    return []


def grammar_violations(package: Path) -> list[str]:
    """Files that a host's Python cannot read."""
    found = []
    for path in sorted(package.rglob("*.py")):
        folders = path.relative_to(package).parts[:-1]
        if (folders[0] if folders else "") in SHIPPED:
            try:
                ast.parse(path.read_text("utf-8"), feature_version=TARGET_GRAMMAR)
            except SyntaxError as error:
                found.append(f"{path.relative_to(package)}: {error.msg}")
    return found


def library_violations(library: Path) -> list[str]:
    """Imports of Ansible modules that AnsiballZ should not ship."""
    found = []
    for path in sorted(library.glob("*.py")):
        for level, name, line in imports_of(ast.parse(path.read_text("utf-8"))):
            allowed = name.startswith((*LIBRARY_MAY_IMPORT, "ansible.module_utils.basic.", "__future__."))
            if level or not allowed:
                found.append(f"{path.name}:{line}: imports {'.' * level}{name}")
    return found


def test_every_room_enters_only_where_it_may() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} >= {"core", "host"}
    assert room_violations(PACKAGE) == []


def test_what_is_shipped_to_hosts_has_their_grammar() -> None:
    assert grammar_violations(PACKAGE) == []


def test_modules_import_core_host_and_basic_only() -> None:
    assert list(LIBRARY.glob("kvp_*.py"))
    assert library_violations(LIBRARY) == []


def test_module_utils_holds_nothing_else() -> None:
    """Every other name there would shadow one of Ansible's own."""
    assert [path.name for path in PACKAGE.parent.iterdir() if path.name != "__pycache__"] == ["kvpersist"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "kvpersist"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("core/gate.py", "import yaml", "core imports yaml, which is not in the standard library"),
        ("core/gate.py", "def f():\n    import yaml", "core imports yaml"),
        ("core/gate.py", "from ..host import files", "core enters host.files"),
        ("core/gate.py", "from ..host.files import read_text", "core enters host.files.read_text"),
        ("core/gate.py", "from .. import host", "core enters host"),
        ("core/gate.py", "def f():\n    from ..cli import main", "core enters cli.main"),
        ("core/gate.py", "from .. import __version__", "core enters __version__"),
        ("core/gate.py", "from kvpersist.core import errors", "kvpersist.core.errors is not imported relatively"),
        ("core/gate.py", "import importlib\nimportlib.import_module('yaml')", "core imports <at run time>"),
        ("core/gate.py", "__import__('yaml')", "core imports <at run time>"),
        ("core/gate.py", "from .... import x", "leaves the package"),
        ("host/files.py", "import requests.sessions", "host imports requests.sessions"),
        ("host/files.py", "from ..cli.main import main", "host enters cli.main.main"),
        ("host/files.py", "from ansible.module_utils.basic import AnsibleModule", "is not imported relatively"),
        ("cli/main.py", "from ansible.module_utils import basic", "is not imported relatively"),
        ("cli/main.py", "import kvpersist", "kvpersist is not imported relatively"),
        ("core/__init__.py", "from . import errors", "an __init__.py imports errors"),
        ("__init__.py", "import os", "an __init__.py imports os"),
        ("attic/__init__.py", "", "attic is no room"),
    ],
)
def test_a_broken_room_rule_is_found(file: str, code: str, complaint: str, package: Path) -> None:
    path = package / file
    path.parent.mkdir(exist_ok=True)
    before = path.read_text("utf-8") if path.exists() else ""
    path.write_text(f"{before}\n{code}\n", "utf-8")
    (violation,) = room_violations(package)
    assert violation.startswith(file)
    assert complaint in violation


@pytest.mark.parametrize(
    ("file", "code", "found"),
    [
        ("core/gate.py", "match 1:\n    case _:\n        pass", 1),
        ("host/files.py", "try:\n    pass\nexcept* OSError:\n    pass", 1),
        ("core/gate.py", "def f[T](x: T) -> T: ...", 1),
        ("core/gate.py", "if (y := 3) > 2: pass", 0),
        ("cli/main.py", "match 1:\n    case _:\n        pass", 0),  # the command runs on Pythons that we choose
    ],
)
def test_newer_grammar_is_found_where_it_is_shipped(file: str, code: str, found: int, package: Path) -> None:
    path = package / file
    path.write_text(f"{path.read_text('utf-8')}\n{code}\n", "utf-8")
    assert len(grammar_violations(package)) == found


@pytest.mark.parametrize(
    "code",
    [
        "import json",
        "import yaml",
        "from ansible.module_utils.urls import open_url",
        "from ansible.module_utils.kvpersist.cli.main import main",
        "from ansible.module_utils.kvpersist import cli",
        "def f():\n    from kvpersist.core import errors",
        "from ..plugins import x",
        "__import__('yaml')",
    ],
)
def test_a_module_that_reaches_further_is_found(code: str, tmp_path: Path) -> None:
    good = "from ansible.module_utils.basic import AnsibleModule\n"
    (tmp_path / "kvp_x.py").write_text(good, "utf-8")
    assert library_violations(tmp_path) == []
    (tmp_path / "kvp_x.py").write_text(good + code, "utf-8")
    assert len(library_violations(tmp_path)) == 1
