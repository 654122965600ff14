"""host.managed: what is predicted is what is done."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Callable

import pytest
from kvpersist.core.errors import UsageError
from kvpersist.host.managed import manage_allocated_file, manage_file, manage_link


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            str(path.readlink()) if path.is_symlink() else path.read_text(encoding="utf-8") if path.is_file() else "",
        )
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "prepare",
    [
        lambda path: None,
        lambda path: (path.write_text("new\n"), path.chmod(0o600)),
        lambda path: (path.write_text("old\n"), path.chmod(0o600)),
        lambda path: (path.write_text("new\n"), path.chmod(0o644)),
        lambda path: (path.write_text(""), path.chmod(0o600)),
    ],
    ids=["missing", "same", "other-content", "other-mode", "empty"],
)
def test_plan_of_a_file_equals_what_is_applied_and_writes_nothing(
    tmp_path: Path, prepare: Callable[[Path], object]
) -> None:
    path = tmp_path / "file"
    prepare(path)
    before = snapshot(tmp_path)
    planned = manage_file(str(path), "new\n", check_mode=True)
    assert snapshot(tmp_path) == before
    applied = manage_file(str(path), "new\n", check_mode=False)
    assert planned == applied
    assert planned.changed == (snapshot(tmp_path) != before)
    assert path.read_text(encoding="utf-8") == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not manage_file(str(path), "new\n", check_mode=True).changed
    assert not manage_file(str(path), "new\n", check_mode=False).changed


def test_a_wrong_mode_is_shown_in_the_diff_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("same\n", encoding="utf-8")
    path.chmod(0o644)
    change = manage_file(str(path), "same\n", check_mode=False)
    assert change.as_result() == {
        "changed": True,
        "diff": {
            "before": "# mode 0644\nsame\n",
            "after": "same\n",
            "before_header": str(path),
            "after_header": str(path),
        },
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_a_link_is_replaced_without_touching_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious", encoding="utf-8")
    target.chmod(0o600)
    (tmp_path / "file").symlink_to(target)
    assert manage_file(str(tmp_path / "file"), "new", check_mode=False).changed
    assert target.read_text(encoding="utf-8") == "precious"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new"


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_folder_or_a_dangling_link_in_place_of_a_file_is_an_error(tmp_path: Path, check_mode: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("/nowhere")
    for name in ("folder", "dangling"):
        with pytest.raises(UsageError, match=f"(reading|writing) {tmp_path / name}"):
            manage_file(str(tmp_path / name), "new", check_mode)


def test_a_file_below_a_file_cannot_be_written_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match=f"(reading|writing) {tmp_path / 'file' / 'below'}: "):
        manage_file(str(tmp_path / "file" / "below"), "new", check_mode=False)


@pytest.mark.parametrize("present", [None, "/models/old", "/models/new"])
def test_plan_of_a_link_equals_what_is_applied_and_writes_nothing(tmp_path: Path, present: str | None) -> None:
    path = tmp_path / "family" / "kvp-1"
    if present:
        path.parent.mkdir()
        path.symlink_to(present)
    before = snapshot(tmp_path)
    planned = manage_link(str(path), "/models/new", check_mode=True)
    assert snapshot(tmp_path) == before
    assert manage_link(str(path), "/models/new", check_mode=False) == planned
    assert planned.changed == (present != "/models/new")
    assert planned.before == (f"{present}\n" if present else "")
    assert os.readlink(path) == "/models/new"
    assert not manage_link(str(path), "/models/new", check_mode=False).changed


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_file_in_place_of_a_link_is_an_error_in_both_modes(tmp_path: Path, check_mode: bool) -> None:
    path = tmp_path / "kvp-1"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(UsageError, match="something that is not a link stands there"):
        manage_link(str(path), "/models/new", check_mode)
    assert path.read_text(encoding="utf-8") == "precious"


def test_a_link_below_a_file_cannot_be_made_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "family").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match=f"linking {tmp_path / 'family' / 'kvp-1'}: "):
        manage_link(str(tmp_path / "family" / "kvp-1"), "/models/new", check_mode=False)


def blocks(path: Path) -> tuple[int, int]:
    """Mode and bytes of a file, all of which are allocated."""
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size
    return stat.S_IMODE(status.st_mode), status.st_size


@pytest.mark.parametrize(
    ("before", "mode"), [(None, 0), (b"", 0o600), (b"x" * 4096, 0o600), (b"x" * 65536, 0o644), (b"x" * 99_999, 0o600)]
)
def test_a_file_is_allocated_as_planned_and_keeps_what_it_holds(
    tmp_path: Path, before: bytes | None, mode: int
) -> None:
    path = tmp_path / "slots"
    if before is not None:
        path.write_bytes(before)
        path.chmod(mode)
    untouched = path.stat() if before is not None else None
    planned = manage_allocated_file(str(path), 65536, check_mode=True)
    assert (path.stat() if path.exists() else None) == untouched
    assert planned.changed
    assert manage_allocated_file(str(path), 65536, check_mode=False) == planned
    assert blocks(path) == (0o600, 65536)
    assert path.read_bytes() == (before or b"")[:65536].ljust(65536, b"\0")
    assert not manage_allocated_file(str(path), 65536, check_mode=False).changed


@pytest.mark.parametrize("before", [None, b"kept"])
def test_a_disk_without_room_leaves_everything_as_it_was(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "slots"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(UsageError, match=r"allocating .* bytes as .*: (no space left|file too large)"):
        manage_allocated_file(str(path), 1 << 62, check_mode=False)
    assert (path.read_bytes() if path.exists() else None) == before


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/dev/null")], ids=["folder", "link"])
def test_something_else_in_the_place_of_an_allocated_file_is_refused(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "slots")
    with pytest.raises(UsageError, match="something that is not a file stands there"):
        manage_allocated_file(str(tmp_path / "slots"), 4096, check_mode=True)
