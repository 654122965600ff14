"""The kvpersist command, run in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvp_kit import (
    PROJECT,
    Deployed,
    Spawn,
    clean_environment,
    download_from_hugging_face,
    kvpersist,
    start_stub_cache,
    start_stub_engine,
)
from kvpersist import __version__
from kvpersist.host.hashing import HashCache

_COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def saved(deployed: Deployed) -> Deployed:
    deployed.save_identity()
    return deployed


@pytest.fixture
def running(saved: Deployed, spawn: Spawn) -> Deployed:
    identity = saved.save_identity()
    start_stub_cache(saved, spawn)
    saved.answer(lmc_version="0.5.6", status={"model_name": identity.model_path})
    start_stub_engine(saved, spawn, identity.namespace)
    return saved


def run(deployed: Deployed, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kvpersist(*arguments, "--config-dir", str(deployed.config_dir))


def as_json(result: subprocess.CompletedProcess[str], code: int) -> dict[str, Any]:
    assert (result.returncode, result.stderr) == (code, "")
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def one_error(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert re.match(r"ERROR: .+: .+\. .+\.$", line), line
    return line


def returned_keys(module: str) -> set[str]:
    text = (PROJECT / "library" / f"{module}.py").read_text(encoding="utf-8")
    (documentation,) = re.findall(r'^RETURN = r"""\n(.*?)^"""', text, re.DOTALL | re.MULTILINE)
    return set(yaml.safe_load(documentation))


# --json


def test_json_of_gate_has_the_keys_of_its_module(running: Deployed) -> None:
    content = as_json(run(running, "gate", "--json"), 0)
    assert set(content) == returned_keys("kvp_gate")
    assert (content["verdict"], content["exit_code"]) == ("verified", 0)


def test_json_of_preflight_has_the_keys_of_its_module(saved: Deployed) -> None:
    content = as_json(run(saved, "preflight", "--json"), 0)
    assert set(content) == returned_keys("kvp_preflight_info")
    assert content["problems"] == []


def test_json_of_identity_has_the_keys_of_its_module_but_for_differences_from_an_earlier_one(saved: Deployed) -> None:
    content = as_json(run(saved, "identity", "--json"), 0)
    assert set(content) == returned_keys("kvp_identity") - {"differences", "explanation"}
    assert set(content["sources"]) == set(content["identity"])
    assert content["model_path"] == f"{saved.root}/models/tiny/{content['namespace']}"
    assert content["identity"]["kv_cache_dtype"] == "bfloat16"


def test_json_of_model_name_is_the_namespace(saved: Deployed) -> None:
    namespace = saved.save_identity().namespace
    assert as_json(run(saved, "model-name", "--json"), 0) == {"namespace": namespace}
    assert run(saved, "model-name").stdout == f"{namespace}\n"


def test_json_of_config_is_every_setting_in_effect(saved: Deployed) -> None:
    content = as_json(run(saved, "config", "--json"), 0)
    assert {name: content[name] for name in saved.settings} == saved.settings
    exported = kvpersist(
        "config", "--json", environment={"KVP_CONFIG_DIR": str(saved.config_dir), "MAX_MODEL_LEN": "99"}
    )
    assert as_json(exported, 0)["vllm_engine_max_model_len"] == 99


ANSWER = {"text": "Paris", "ttft_s": 1.5, "prompt_tokens": 900, "cached_tokens": 0}


def write_result(deployed: Deployed, name: str, verdict: str, **more: Any) -> Path:
    folder = deployed.root / "state" / "results" / name
    folder.mkdir(parents=True)
    content = {"namespace": "kvp-1", "folder": str(folder), "plan": {}, "verdict": verdict, **more}
    (folder / "recovery.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 5)])
def test_json_of_the_last_recovery_has_the_keys_of_its_module(saved: Deployed, verdict: str, code: int) -> None:
    write_result(saved, "20250101T000000Z-recovery", "PASS" if code else "FAIL")
    (saved.root / "state" / "results" / "20260101T000001Z-interrupted").mkdir()
    restart = {"scenario": "A", "answer": {**ANSWER, "cached_tokens": 768}, "l2_tokens": 512}
    outcome = {"scenario": "A", "verdict": verdict, "failures": ["the answer changed"], "missing": []}
    folder = write_result(
        saved, "20260101T000000Z-recovery", verdict, cold=ANSWER, restarts=[restart], outcomes=[outcome]
    )
    content = as_json(run(saved, "recover", "--last", "--json"), code)
    assert returned_keys("kvp_recovery") <= set(content)
    assert (content["verdict"], content["exit_code"], content["folder"]) == (verdict, code, str(folder))
    assert ["A: cached tokens", "768"] in content["summary"]
    human = run(saved, "recover", "--last")
    assert human.returncode == code
    assert "A: the answer changed" in human.stdout
    assert f"Evidence: {folder}" in human.stdout.replace("\n", "")


def test_the_last_recovery_that_ended_in_an_error_is_shown(saved: Deployed) -> None:
    write_result(saved, "20260101T000000Z-recovery", "INCONCLUSIVE", error="the engine did not come back")
    assert as_json(run(saved, "recover", "--last", "--json"), 5)["summary"] == []
    human = run(saved, "recover", "--last")
    assert human.returncode == 5
    assert "INCONCLUSIVE: the engine did not come back" in human.stdout


# identity explain and history


def test_what_changed_is_explained_with_both_values_and_the_way_back(saved: Deployed) -> None:
    first = saved.save_identity().namespace
    saved.settings.update(vllm_engine_kv_cache_dtype="fp8")
    second = saved.save_identity().namespace
    result = run(saved, "identity", "explain", first, "current")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0] == f"{first} -> {second}: KV stored so far is not reused."
    assert "kv_cache_dtype: 'bfloat16' -> 'fp8'. " in result.stdout
    content = as_json(
        kvpersist("identity", "--json", "--config-dir", str(saved.config_dir), "explain", first, second), 0
    )
    assert content["lines"] == result.stdout.splitlines()
    assert as_json(run(saved, "identity", "explain", first, second, "--json"), 0) == content
    assert [change["name"] for change in content["changes"]] == ["kv_cache_dtype"]
    assert (content["reusable"], content["stored"]["objects"]) == (False, 0)


def test_an_unknown_identity_is_one_line(saved: Deployed) -> None:
    assert "no deployment of this host had it" in one_error(run(saved, "identity", "explain", "kvp-1", "current"), 2)
    assert "no engine that can be seen listens" in one_error(run(saved, "identity", "explain", "current", "running"), 5)


def test_the_history_is_a_table_and_json_with_files_and_times(saved: Deployed) -> None:
    first = saved.save_identity().namespace
    saved.settings["vllm_engine_max_model_len"] = 1024
    second = saved.save_identity().namespace
    damaged = saved.root / "state" / "identities" / f"kvp-{'0' * 32}.json"
    damaged.write_text("{", encoding="utf-8")
    result = run(saved, "identity", "history")
    assert result.returncode == 0
    assert result.stderr == f"WARNING: {damaged} holds no identity of this host. Remove it.\n"
    lines = [line for line in result.stdout.splitlines() if "kvp-" in line]
    assert [first in lines[1], second in lines[0], "current" in lines[0], "current" in lines[1]] == [True] * 3 + [False]
    damaged.unlink()
    content = as_json(run(saved, "identity", "history", "--json"), 0)
    assert [(each["namespace"], each["current"]) for each in content["identities"]] == [(second, True), (first, False)]
    assert "MAX_MODEL_LEN=512" in content["identities"][1]["files"]["tp4.env"]


# Exit codes and errors


def test_without_a_deployment_every_command_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    for command in ("model-name", "identity", "preflight", "gate", "recover", "config", "launch cache"):
        result = kvpersist(*command.split(), "--config-dir", str(tmp_path / "none"))
        line = one_error(result, 2)
        assert "there is no such folder. Deploy with ansible-playbook site.yml, or give --config-dir." in line


def test_wrong_arguments_exit_2() -> None:
    for arguments in ((), ("unknown",), ("launch", "unknown"), ("launch", "engine", "--variant", "unknown")):
        result = kvpersist(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("usage: kvpersist")


def test_version_is_that_of_the_package() -> None:
    assert kvpersist("--version").stdout == f"{__version__}\n"


def test_preflight_problems_exit_3_one_line_each(saved: Deployed) -> None:
    (saved.model / "tokenizer.json").unlink()
    (saved.venv / "bin" / "python").unlink()
    result = run(saved, "preflight")
    assert result.returncode == 3
    assert [line[:7] for line in result.stdout.splitlines()] == ["ERROR: ", "ERROR: "]
    assert len(as_json(run(saved, "preflight", "--json"), 3)["problems"]) == 2


def test_a_ready_host_says_so(saved: Deployed) -> None:
    result = run(saved, "preflight")
    assert (result.returncode, result.stdout, result.stderr) == (0, "This host is ready.\n", "")
    saved.settings["cache_server_l2_backend"] = "fs"
    saved.render()
    result = run(saved, "preflight")
    assert (result.returncode, result.stderr) == (0, "")
    assert [line[:27] for line in result.stdout.splitlines()] == ["WARNING: kvp_cache_budget_g", "This host is ready."]


def test_an_edited_identity_is_a_mismatch_exit_4_in_gate_and_model_name(running: Deployed) -> None:
    running.edit_env("identity.env.local", "KVP_KV_CACHE_DTYPE=bfloat16", "KVP_KV_CACHE_DTYPE=fp8")
    result = run(running, "gate")
    assert (result.returncode, result.stderr) == (4, "")
    assert "MISMATCH kv_cache_dtype: identity 'fp8', running 'bfloat16'\n" in result.stdout
    assert "kv_cache_dtype is 'fp8' there and 'bfloat16' here" in one_error(run(running, "model-name"), 4)


def test_nothing_running_is_inconclusive_exit_5(saved: Deployed) -> None:
    result = run(saved, "gate")
    assert result.returncode == 5
    assert "INCONCLUSIVE block_size: no process that can be seen listens on port" in result.stdout
    assert as_json(run(saved, "gate", "--json"), 5)["exit_code"] == 5


def test_a_damaged_file_is_one_line_with_file_and_line_number(saved: Deployed) -> None:
    with (saved.config_dir / "tp4.env").open("a", encoding="utf-8") as file:
        file.write("NO EQUALS SIGN\n")
    assert re.search(r"tp4\.env line \d+: ", one_error(run(saved, "config"), 2))


def test_a_missing_recovery_result_is_one_line(saved: Deployed) -> None:
    assert "Run kvpersist recover first." in one_error(run(saved, "recover", "--last"), 2)


def test_a_state_folder_that_cannot_be_written_does_not_stop_model_name(saved: Deployed) -> None:
    shutil.rmtree(saved.root / "state", ignore_errors=True)
    (saved.root / "state").write_text("a file", encoding="utf-8")
    assert run(saved, "model-name").returncode == 0


def test_debug_shows_the_traceback_too(saved: Deployed) -> None:
    (saved.config_dir / "identity.env.local").unlink()
    plain, debug = run(saved, "identity"), run(saved, "identity", "--debug")
    line = one_error(plain, 5)
    assert debug.returncode == 5
    assert debug.stderr.startswith("Traceback (most recent call last):\n")
    assert debug.stderr.splitlines()[-1] == line


def test_a_relative_configuration_folder_works(saved: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.root)
    content = as_json(kvpersist("config", "--json", "--config-dir", "etc"), 0)
    assert content["kvp_config_dir"] == str(saved.config_dir)


def test_tables_for_people_hold_every_field(saved: Deployed) -> None:
    text = run(saved, "identity").stdout
    for word in ("namespace", "kv_cache_dtype", "weights_sha256"):
        assert word in text
    assert "vllm_engine_max_model_len" in run(saved, "config").stdout


# Documentation


def test_written_docs_equal_the_committed_ones(tmp_path: Path) -> None:
    result = kvpersist("config", "--write-docs", str(tmp_path / "docs"))
    assert (result.returncode, result.stderr) == (0, "")
    names = [
        name
        for suffix in ("", ".ru", ".zh")
        for name in (f"configuration{suffix}.md", f"reuse{suffix}.md", f"tp4.env.example{suffix}")
    ]
    assert result.stdout.splitlines() == [str(tmp_path / "docs" / name) for name in names]
    for name in names:
        committed = (PROJECT / "docs" / name).read_text(encoding="utf-8")
        assert (tmp_path / "docs" / name).read_text(encoding="utf-8") == committed, "run: make docs"


# Hashing


def test_hash_prints_the_digest_of_every_file_that_decides(saved: Deployed) -> None:
    names = ["tokenizer.json", "tokenizer_config.json", *(path.name for path in saved.model.glob("*.safetensors"))]
    expected = {name: hashlib.sha256((saved.model / name).read_bytes()).hexdigest() for name in names}
    assert as_json(run(saved, "hash", "--json"), 0) == expected
    for name, digest in expected.items():
        assert re.search(rf"{name} +│ {digest}", run(saved, "hash").stdout)


def test_hash_uses_and_corrects_what_is_remembered_unless_told_to_distrust_it(saved: Deployed) -> None:
    shard = saved.model / "model-00001-of-00002.safetensors"
    cache = HashCache(str(saved.root / "state" / "hash-cache.jsonl"), keep=True)
    cache.remember(str(shard), shard.stat(), "0" * 64, sys.maxsize)
    assert as_json(run(saved, "hash", "--json"), 0)[shard.name] == "0" * 64
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    assert as_json(run(saved, "hash", "--json", "--distrust"), 0)[shard.name] == digest


def test_a_shard_that_is_not_what_its_download_expected_is_one_line_that_names_it(saved: Deployed) -> None:
    download_from_hugging_face(saved.model, "a" * 40)
    shard = saved.model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard.name} has SHA-256 " in one_error(run(saved, "hash"), 2)


def test_on_a_terminal_a_bar_tells_rate_and_time_left_and_ctrl_c_ends_it_at_once(saved: Deployed) -> None:
    endless = saved.model / "model-00003.safetensors"
    endless.touch()
    os.truncate(endless, 1 << 40)
    terminal, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "kvpersist.cli", "hash", "--config-dir", str(saved.config_dir)],
        env=clean_environment(TERM="xterm", COLUMNS="120"),
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while not re.search(rb"hashing .*/1\.1 TB [0-9.]+ [GM]B/s [0-9]:[0-9]{2}:[0-9]{2}", _COLOURS.sub(b"", seen)):
        seen += os.read(terminal, 4096)
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # a terminal's end
        while os.read(terminal, 4096):
            pass
    output, _ = child.communicate()
    os.close(terminal)
    assert (child.returncode, output) == (130, b"")
    assert time.monotonic() - began < 10
