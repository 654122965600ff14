"""host.history: what a host has had, what of it can come back, and what lies on disk under each."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from kvp_kit import Deployed, Spawn, start_stub_engine
from kvpersist.core import layout
from kvpersist.core.errors import InconclusiveError, MismatchError, UsageError
from kvpersist.core.frames import FrameKey
from kvpersist.core.settings import FILES, validate
from kvpersist.host import history
from kvpersist.host.history import Entry, entries, find, named, stored_under
from kvpersist.host.identity import plan_rollback, save_identity

UNKNOWN = "kvp-" + "0" * 32


def folder_of(deployed: Deployed) -> Path:
    return deployed.root / "state" / "identities"


def known(deployed: Deployed) -> list[Entry]:
    found, damaged = entries(deployed.settings["kvp_state_dir"])
    assert damaged == []
    return found


def typed(deployed: Deployed) -> dict[str, Any]:
    return validate(deployed.settings, "testing")


def two(deployed: Deployed) -> tuple[str, str]:
    first = deployed.save_identity().namespace
    deployed.settings["vllm_engine_max_model_len"] = 1024
    return first, deployed.save_identity().namespace


# What is kept


def test_a_deployment_is_kept_with_its_files_sources_and_time(deployed: Deployed) -> None:
    saved = deployed.save_identity()
    (entry,) = known(deployed)
    assert (entry.namespace, entry.model_path) == (saved.namespace, saved.model_path)
    assert entry.identity == saved.identity.as_dict()
    assert entry.sources == saved.sources
    assert sorted(entry.files) == sorted([*FILES, "identity.env.local"])
    for name, text in entry.files.items():
        assert text == (deployed.config_dir / name).read_text("utf-8")
    assert entry.deployed.endswith("+00:00")


def test_files_and_folder_are_for_the_owner_alone_and_nothing_is_left_over(deployed: Deployed) -> None:
    saved = deployed.save_identity()
    folder = folder_of(deployed)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [f"{saved.namespace}.json"]
    assert stat.S_IMODE((folder / f"{saved.namespace}.json").stat().st_mode) == 0o600


def test_the_same_deployment_again_writes_nothing(deployed: Deployed) -> None:
    path = folder_of(deployed) / f"{deployed.save_identity().namespace}.json"
    before = path.read_bytes(), path.stat().st_ino
    assert not deployed.save_identity().as_result()["changed"]
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_check_mode_keeps_nothing(deployed: Deployed) -> None:
    deployed.render()
    save_identity(deployed.deployment, trust_hash_cache=True, check_mode=True)
    assert not folder_of(deployed).exists()


def test_the_newest_comes_first_and_going_back_makes_an_old_one_the_newest(deployed: Deployed) -> None:
    first, second = two(deployed)
    assert [entry.namespace for entry in known(deployed)] == [second, first]
    deployed.settings["vllm_engine_max_model_len"] = 512
    deployed.save_identity()
    assert [entry.namespace for entry in known(deployed)] == [first, second]


def test_a_namespace_is_kept_once_with_the_files_of_its_last_deployment(deployed: Deployed) -> None:
    deployed.save_identity()
    deployed.settings["vllm_engine_max_num_seqs"] = 7
    deployed.save_identity()
    (entry,) = known(deployed)
    assert "\nMAX_NUM_SEQS=7\n" in entry.files["tp4.env"]


def test_the_history_is_bounded_and_keeps_the_newest(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST", 3)
    made = []
    for length in range(512, 518):
        deployed.settings["vllm_engine_max_model_len"] = length
        made.append(deployed.save_identity().namespace)
    assert [entry.namespace for entry in known(deployed)] == made[:2:-1]


def test_a_state_folder_that_cannot_be_written_is_a_warning(deployed: Deployed) -> None:
    Path(deployed.settings["kvp_state_dir"]).write_text("a file", "utf-8")
    saved = deployed.save_identity()
    assert saved.as_result()["changed"]
    (warning,) = saved.warnings
    assert "identities" in warning
    assert "a rollback to this identity is not possible" in warning


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "{}", '{"namespace": 1}', json.dumps(dict.fromkeys(Entry.__dataclass_fields__, "x")), "\0\1"],
)
def test_a_damaged_file_hides_no_other_and_is_named(deployed: Deployed, damage: str) -> None:
    first, second = two(deployed)
    path = folder_of(deployed) / f"{first}.json"
    path.write_text(damage, "utf-8")
    found, damaged = entries(deployed.settings["kvp_state_dir"])
    assert [entry.namespace for entry in found] == [second]
    assert damaged == [str(path)]
    with pytest.raises(UsageError, match=f"reading {path}"):
        find(deployed.settings["kvp_state_dir"], first)
    deployed.settings["vllm_engine_max_model_len"] = 512
    deployed.save_identity()
    assert [entry.namespace for entry in known(deployed)] == [first, second]


def test_a_file_under_another_name_is_not_believed(deployed: Deployed) -> None:
    saved = deployed.save_identity()
    folder = folder_of(deployed)
    (folder / f"{saved.namespace}.json").rename(folder / f"{UNKNOWN}.json")
    assert entries(deployed.settings["kvp_state_dir"]) == ([], [f"{folder}/{UNKNOWN}.json"])


# Naming an identity


def test_words_namespaces_and_files_name_identities(deployed: Deployed, tmp_path: Path) -> None:
    first, second = two(deployed)
    deployment = deployed.deployment
    assert named(deployment, "current").namespace == second
    assert named(deployment, first).namespace == first
    assert named(deployment, first).model_path == f"{deployed.root}/models/tiny/{first}"
    copy = tmp_path / "copy.env"
    copy.write_text(find(deployed.settings["kvp_state_dir"], first).files["identity.env.local"], "utf-8")
    assert named(deployment, str(copy)).namespace == first
    assert named(deployment, str(copy)).fields == named(deployment, first).fields


@pytest.mark.parametrize("word", [UNKNOWN, "kvp-", "../etc/passwd", "", "/nowhere/identity.env.local"])
def test_an_unknown_identity_is_one_line_that_lists_the_known_ones(deployed: Deployed, word: str) -> None:
    saved = deployed.save_identity()
    with pytest.raises(UsageError) as caught:
        named(deployed.deployment, word)
    assert f"no deployment of this host had it (known: {saved.namespace})" in str(caught.value)


def test_what_runs_is_told_by_the_path_it_serves(deployed: Deployed, spawn: Spawn) -> None:
    first = deployed.save_identity().namespace
    start_stub_engine(deployed, spawn, first)
    assert named(deployed.deployment, "running").namespace == first
    deployed.settings["vllm_engine_max_model_len"] = 1024
    second = deployed.save_identity().namespace
    assert named(deployed.deployment, "running").namespace == first
    assert named(deployed.deployment, "current").namespace == second


def test_nothing_running_and_a_stranger_running_are_inconclusive(deployed: Deployed, spawn: Spawn) -> None:
    deployed.save_identity()
    with pytest.raises(InconclusiveError, match="no engine that can be seen listens"):
        named(deployed.deployment, "running")
    start_stub_engine(deployed, spawn, UNKNOWN)
    with pytest.raises(InconclusiveError, match="no identity of this host is served as"):
        named(deployed.deployment, "running")


# What lies on disk


def put(root: Path, namespace: str, number: int, size: int) -> None:
    path = root / layout.object_path(FrameKey(namespace, 0, 0, bytes([number]) * 32, ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def test_objects_of_exactly_one_namespace_are_counted_and_the_command_removes_them(tmp_path: Path) -> None:
    root = tmp_path / "with space"
    one, other = "kvp-" + "1" * 32, "kvp-" + "2" * 32
    put(root, one, 1, 8192)
    put(root, one, 2, 4096)
    put(root, other, 1, 4096)
    (root / one / "01" / "half.bin.tmp.x").write_bytes(b"x")
    (root / one / layout.MODEL_FILE).write_text("{}", "utf-8")
    stored = stored_under(str(root), f"/anywhere/tiny/{one}")
    assert stored is not None
    assert (stored.objects, stored.bytes) == (2, 12288)
    assert os.system(stored.remove) == 0  # noqa: S605  # it is what a person would type
    assert not (root / one).exists()
    assert stored_under(str(root), f"/models/tiny/{one}") == dataclasses.replace(stored, objects=0, bytes=0)
    other_stored = stored_under(str(root), f"/models/tiny/{other}")
    assert other_stored is not None
    assert other_stored.objects == 1


def test_files_of_lmcache_s_own_adapters_are_counted_by_their_names(tmp_path: Path) -> None:
    one, other = "kvp-" + "1" * 32, "kvp-" + "2" * 32
    for namespace, size in ((one, 10), (one, 20), (other, 40)):
        (tmp_path / f"-SEP-models-SEP-tiny-SEP-{namespace}@{size}.data").write_bytes(b"x" * size)
    stored = stored_under(str(tmp_path), f"/models/tiny/{one}")
    assert stored is not None
    assert (stored.objects, stored.bytes) == (2, 30)
    assert os.system(stored.remove) == 0  # noqa: S605
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [40]


def test_a_root_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    stored = stored_under(str(tmp_path / "none"), f"/models/tiny/{UNKNOWN}")
    assert stored is not None
    assert (stored.objects, stored.bytes) == (0, 0)


# Going back


def test_a_rollback_has_the_earlier_settings_and_what_differs(deployed: Deployed) -> None:
    earlier = typed(deployed)
    first, _ = two(deployed)
    deployed.settings["vllm_engine_max_num_seqs"] = 9
    plan = plan_rollback(typed(deployed), first)
    assert plan.values == earlier
    assert (plan.namespace, plan.model_path) == (first, f"{deployed.root}/models/tiny/{first}")
    assert plan.as_result()["differences"] == [
        {"name": "vllm_engine_max_num_seqs", "now": 9, "then": 2},
        {"name": "vllm_engine_max_model_len", "now": 1024, "then": 512},
    ]
    assert plan_rollback(plan.values, first).as_result()["differences"] == []


def test_an_unknown_namespace_is_refused_with_the_known_ones(deployed: Deployed) -> None:
    first, second = two(deployed)
    with pytest.raises(UsageError) as caught:
        plan_rollback(typed(deployed), UNKNOWN)
    assert str(caught.value) == (
        f"looking for '{UNKNOWN}' in this host's history: no deployment of this host had it "
        f"(known: {second}, {first}). Choose one that kvpersist identity history lists."
    )


def test_a_missing_model_is_refused_and_named(deployed: Deployed, tmp_path: Path) -> None:
    first, _ = two(deployed)
    deployed.model.rename(tmp_path / "away")
    with pytest.raises(UsageError, match=f"reading the model folder {deployed.model}: it is not a folder"):
        plan_rollback(typed(deployed), first)


def test_other_weights_in_the_same_place_are_refused_and_named(deployed: Deployed) -> None:
    first, _ = two(deployed)
    with (deployed.model / "model-00001-of-00002.safetensors").open("r+b") as file:
        file.write(b"other")
    with pytest.raises(MismatchError, match=f"bringing back {first}: .*weights_sha256 was '.*' and is '"):
        plan_rollback(typed(deployed), first)


def test_an_upgraded_environment_is_refused_and_named(deployed: Deployed) -> None:
    first, _ = two(deployed)
    (site,) = (deployed.venv / "lib").glob("python3*/site-packages")
    (site / "lmcache-0.5.6.dist-info").rename(site / "lmcache-0.5.7.dist-info")
    with pytest.raises(MismatchError, match=r"lmcache_version was '0\.5\.6' and is '0\.5\.7'\. Put back"):
        plan_rollback(typed(deployed), first)


def test_an_entry_without_its_files_is_refused(deployed: Deployed) -> None:
    first, _ = two(deployed)
    path = folder_of(deployed) / f"{first}.json"
    content = json.loads(path.read_text("utf-8"))
    del content["files"]["tp4.env"]
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(UsageError, match=r"tp4\.env was not kept\. Choose another\."):
        plan_rollback(typed(deployed), first)


def test_planning_a_rollback_writes_nothing(deployed: Deployed) -> None:
    first, _ = two(deployed)
    before = {path: path.lstat().st_mtime_ns for path in deployed.root.rglob("*")}
    plan_rollback(typed(deployed), first)
    assert {path: path.lstat().st_mtime_ns for path in deployed.root.rglob("*")} == before
