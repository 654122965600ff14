"""host.huggingface: what a download leaves behind, in both layouts."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core.errors import UsageError
from kvpersist.host.huggingface import Download, read_download

COMMIT, OTHER = "a" * 40, "b" * 40
NOTHING = Download({}, None)
NAMES = ["model-1.safetensors", "model-2.safetensors"]
DIGESTS = {name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder as `hf download --local-dir` fills it."""
    folder = tmp_path / "model"
    for name in NAMES:
        metadata(folder, name).parent.mkdir(parents=True, exist_ok=True)
        metadata(folder, name).write_text(f"{COMMIT}\n{DIGESTS[name]}\n1712656091.123\n", encoding="utf-8")
        (folder / name).write_text(name, encoding="utf-8")
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot in the cache, as `hf download` fills it."""
    repository = tmp_path / "models--org--name"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in NAMES:
        (repository / "blobs" / DIGESTS[name]).write_text(name, encoding="utf-8")
        (folder / name).symlink_to(f"../../blobs/{DIGESTS[name]}")
    return folder


@pytest.fixture(params=["local", "snapshot"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def metadata(folder: Path, name: str) -> Path:
    return folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"


def read(folder: Path) -> Download:
    return read_download(str(folder), NAMES)


def test_both_layouts_give_the_commit_and_every_digest(folder: Path) -> None:
    assert read(folder) == Download(DIGESTS, COMMIT)


def test_both_layouts_are_understood_behind_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert read(tmp_path / "link") == Download(DIGESTS, COMMIT)


def test_a_file_that_the_download_does_not_know_leaves_no_commit_for_all(folder: Path) -> None:
    (folder / "own").write_text("own", encoding="utf-8")
    assert read_download(str(folder), [*NAMES, "own"]) == Download(DIGESTS, None)


def test_a_small_file_has_a_git_hash_which_is_no_sha256(local: Path, snapshot: Path) -> None:
    git = "c" * 40
    metadata(local, NAMES[0]).write_text(f"{COMMIT}\n{git}\n1712656091.123\n", encoding="utf-8")
    (snapshot / NAMES[0]).unlink()
    (snapshot / NAMES[0]).symlink_to(f"../../blobs/{git}")
    for folder in (local, snapshot):
        assert read(folder) == Download({NAMES[1]: DIGESTS[NAMES[1]]}, None)


def test_shards_of_two_commits_have_no_common_one(local: Path) -> None:
    metadata(local, NAMES[0]).write_text(f"{OTHER}\n{DIGESTS[NAMES[0]]}\n1712656091.123\n", encoding="utf-8")
    assert read(local) == Download(DIGESTS, None)


def test_a_folder_of_nobody_s_download_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path) == NOTHING
    (tmp_path / ".cache").write_text("a file", encoding="utf-8")
    assert read(tmp_path) == NOTHING


@pytest.mark.parametrize("moved", ["snapshots/main", f"elsewhere/{COMMIT}", f"snapshots/{COMMIT[:39]}"])
def test_links_into_blobs_are_a_snapshot_only_in_a_folder_that_is_a_commit_s(snapshot: Path, moved: str) -> None:
    target = snapshot.parents[1] / moved
    target.parent.mkdir(exist_ok=True)
    snapshot.rename(target)
    assert read(target) == NOTHING


def test_links_that_lead_elsewhere_are_no_snapshot(snapshot: Path) -> None:
    (snapshot.parents[1] / "blobs").rename(snapshot.parents[1] / "other")
    for name in NAMES:
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(f"../../other/{DIGESTS[name]}")
    assert read(snapshot) == NOTHING


@given(content=st.binary(max_size=120))
def test_damaged_metadata_says_nothing(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("model")
    metadata(folder, NAMES[0]).parent.mkdir(parents=True)
    metadata(folder, NAMES[0]).write_bytes(content)
    assert read(folder) == NOTHING
    shutil.rmtree(folder)


@pytest.mark.parametrize("length", [0, 40, 41, 104, 105, 120])
def test_metadata_counts_once_both_lines_are_whole(local: Path, length: int) -> None:
    path = metadata(local, NAMES[0])
    path.write_bytes(path.read_bytes()[:length])
    assert (NAMES[0] in read(local).expected) == (length > 105)


def test_a_pipe_or_a_folder_in_the_place_of_metadata_says_nothing(local: Path) -> None:
    for name, make in zip(NAMES, (os.mkfifo, os.mkdir)):
        metadata(local, name).unlink()
        make(metadata(local, name))
    assert read(local) == NOTHING


def test_metadata_that_may_not_be_read_is_an_error_since_it_decides(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "stat", refuse)  # root, who may run the tests, is refused nothing
    with pytest.raises(UsageError, match=rf"reading {metadata(local, NAMES[0])}: permission denied\. "):
        read(local)
