"""What no file of this repository may be or hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LARGEST = 1024 * 1024
# Put together here, so that this file does not find itself.
LATER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME")) + r")\b")
OWN_MACHINE = re.compile(r"(?<![\w.}/-])/(?:" + "|".join(("ro" + "ot", "wo" + "rk")) + r")/")


def files_of(root: Path) -> list[Path]:
    """Tracked files and those that would be with the next commit."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = (root / name for name in listed.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def file_problems(path: Path) -> list[str]:
    """What is wrong with one file."""
    content = path.read_bytes()
    found = []
    if len(content) > LARGEST:
        found.append(f"{path}: {len(content)} bytes")
    if b"\0" in content[:8192]:
        return found
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        if LATER.search(line):
            found.append(f"{path}:{number}: leaves something for later")
        if OWN_MACHINE.search(line):
            found.append(f"{path}:{number}: a path of a developer's machine")
    return found


def role_problems(roles: Path) -> list[str]:
    """Roles without what every role has."""
    found = []
    for role in sorted(path for path in roles.iterdir() if path.is_dir()):
        meta = role / "meta" / "main.yml"
        if not meta.is_file():
            found.append(f"{role.name}: meta/main.yml is missing")
        elif not yaml.safe_load(meta.read_text("utf-8")).get("galaxy_info", {}).get("description"):
            found.append(f"{role.name}: meta/main.yml has no description")
        if not any((role / "tasks").glob("*.yml")):
            found.append(f"{role.name}: has no tasks")
    return found


def test_no_file_is_large_unfinished_or_names_a_developer_s_machine() -> None:
    files = files_of(ROOT)
    assert ROOT / "pyproject.toml" in files
    assert [problem for path in files for problem in file_problems(path)] == []


def test_every_role_has_its_description_and_tasks() -> None:
    assert role_problems(ROOT / "roles") == []


@pytest.mark.parametrize(
    ("content", "complaints"),
    [
        (b"x" * (LARGEST + 1), 1),
        (b"x" * LARGEST, 0),
        (b"\0" * (LARGEST + 1), 1),
        (f"a\n# {'TO' + 'DO'}: later\n".encode(), 1),
        (f"{'FIX' + 'ME'}".encode(), 1),
        (f"{'TO' + 'DO'}LIST = 1".encode(), 0),
        (f"path: /{'ro' + 'ot'}/dev/h\n".encode(), 1),
        (f"cd /{'wo' + 'rk'}/main && x".encode(), 1),
        (f'f"/proc/{{pid}}/{"ro" + "ot"}/x"'.encode(), 0),
        (f"https://example.org/{'wo' + 'rk'}/x".encode(), 0),
        (f"src/{'wo' + 'rk'}/x, /{'wo' + 'rk'}ers/x".encode(), 0),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(content: bytes, complaints: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert len(file_problems(path)) == complaints


def test_files_that_are_not_committed_yet_count_and_ignored_ones_do_not(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, capture_output=True)
    (tmp_path / ".gitignore").write_text("ignored\n", "utf-8")
    (tmp_path / "new").write_text("x", "utf-8")
    (tmp_path / "ignored").write_text("x", "utf-8")
    assert sorted(path.name for path in files_of(tmp_path)) == [".gitignore", "new"]


@pytest.mark.parametrize(
    ("meta", "task", "complaint"),
    [
        (None, "x: 1", "one: meta/main.yml is missing"),
        ("galaxy_info: {author: me}", "x: 1", "one: meta/main.yml has no description"),
        ("galaxy_info: {description: Does it.}", None, "one: has no tasks"),
    ],
)
def test_a_role_without_its_parts_is_found(meta: str | None, task: str | None, complaint: str, tmp_path: Path) -> None:
    for name, content in (("meta", meta), ("tasks", task)):
        (tmp_path / "one" / name).mkdir(parents=True)
        if content is not None:
            (tmp_path / "one" / name / "main.yml").write_text(content, "utf-8")
    assert role_problems(tmp_path) == [complaint]
