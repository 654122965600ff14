"""host.launch through the real command; what it becomes is a stand-in that reports how it was started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvp_kit import Deployed, Spawn, clean_environment, free_ports, kvpersist, start_stub_cache, stub_report

CONNECTOR_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
RUN = {"STUB_EXIT": "0"}


def launch(deployed: Deployed, *arguments: str, **exported: str) -> subprocess.CompletedProcess[str]:
    return kvpersist("launch", *arguments, "--config-dir", str(deployed.config_dir), environment={**RUN, **exported})


def one_error(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("ERROR: ")
    assert "STUB" not in result.stdout, "the program must not have been started"
    return line


def option(report: dict[str, Any], name: str) -> str:
    argv: list[str] = report["argv"]
    return argv[argv.index(name) + 1]


@pytest.fixture
def with_cache(deployed: Deployed, spawn: Spawn) -> Deployed:
    deployed.save_identity()
    start_stub_cache(deployed, spawn)
    return deployed


def test_engine_without_a_healthy_cache_exits_3_at_once_and_says_what_to_start(deployed: Deployed) -> None:
    deployed.save_identity()
    start = time.monotonic()
    line = one_error(launch(deployed, "engine"), 3)
    assert time.monotonic() - start < 5
    assert f"no healthy cache server at 127.0.0.1:{deployed.settings['kvp_cache_port']}" in line
    assert "Start it first: kvpersist launch cache (service kvp-lmcache-server), or set KV_PERSIST=0." in line


def test_engine_needs_the_request_port_of_the_cache_too(with_cache: Deployed) -> None:
    with_cache.settings["kvp_cache_port"] = free_ports(1)[0]
    with_cache.render()
    one_error(launch(with_cache, "engine"), 3)


def test_engine_with_the_cache_confirms_and_becomes_the_stub_engine(with_cache: Deployed) -> None:
    saved = with_cache.save_identity()
    result = launch(with_cache, "engine")
    assert (result.returncode, result.stderr) == (0, "")
    port = with_cache.settings["kvp_cache_port"]
    assert result.stdout.splitlines()[:2] == [
        f"KV_PERSIST=1: attaching LMCache connector LMCacheMPConnector ({CONNECTOR_MODULE}) to 127.0.0.1:{port}",
        f"KV_PERSIST=1: cache-identity namespace -> {saved.model_path}",
    ]
    report = stub_report(result.stdout)
    assert report["argv"][:3] == [f"{with_cache.venv}/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert option(report, "--model") == saved.model_path
    assert f'"lmcache.mp.port":{port}' in option(report, "--kv-transfer-config")
    assert option(report, "--block-size") == "32"
    assert report["environment"]["HF_HUB_OFFLINE"] == "1"


def test_without_kv_persist_the_stub_engine_runs_without_connector_namespace_and_extra_arguments(
    deployed: Deployed,
) -> None:
    deployed.render()
    result = launch(deployed, "engine", KV_PERSIST="0")
    assert (result.returncode, result.stderr) == (0, "")
    assert "KV_PERSIST=1" not in result.stdout
    report = stub_report(result.stdout)
    assert option(report, "--model") == str(deployed.model)
    text = " ".join(report["argv"])
    for word in ("kv-transfer-config", "prompt-tokens-details", "block-size", "lmcache", "kvp-"):
        assert word not in text.replace(str(deployed.root), ""), word


def test_edited_settings_exit_4_naming_the_field_and_both_values(with_cache: Deployed) -> None:
    with_cache.edit_env("tp4.env", "MAX_MODEL_LEN=512", "MAX_MODEL_LEN=640")
    line = one_error(launch(with_cache, "engine"), 4)
    assert "max_model_len is 512 there and 640 here" in line
    assert "kv_cache_dtype" not in line


def test_an_edited_identity_exits_4_naming_the_field(with_cache: Deployed) -> None:
    with_cache.edit_env("identity.env.local", "KVP_KV_CACHE_DTYPE=bfloat16", "KVP_KV_CACHE_DTYPE=fp8")
    assert "kv_cache_dtype is 'fp8' there and 'bfloat16' here" in one_error(launch(with_cache, "engine"), 4)


def test_a_changed_byte_of_a_shard_exits_4(with_cache: Deployed) -> None:
    with (with_cache.model / "model-00001-of-00002.safetensors").open("r+b") as file:
        file.write(b"W")
    assert "weights_sha256 is " in one_error(launch(with_cache, "engine"), 4)


def test_a_missing_identity_exits_5_naming_the_file(with_cache: Deployed) -> None:
    (with_cache.config_dir / "identity.env.local").unlink()
    assert "identity.env.local: no such file" in one_error(launch(with_cache, "engine"), 5)


def test_a_missing_link_exits_3_and_says_what_to_run(with_cache: Deployed) -> None:
    shutil.rmtree(with_cache.root / "models")
    line = one_error(launch(with_cache, "engine"), 3)
    assert f"is not a link to {with_cache.model}" in line
    assert line.endswith("Run the playbook with --tags identity.")


def test_a_namespace_override_warns_and_is_served_by_the_stub_engine(with_cache: Deployed) -> None:
    (with_cache.root / "models" / "tiny" / "my-own").symlink_to(with_cache.model)
    result = launch(with_cache, "engine", KV_PERSIST_NAMESPACE="my-own")
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("WARNING: KV_PERSIST_NAMESPACE=my-own overrides the derived namespace")
    assert option(stub_report(result.stdout), "--model") == f"{with_cache.root}/models/tiny/my-own"


@pytest.mark.parametrize("namespace", ["../../etc", "a b", "a/b", "a@b"])
def test_a_namespace_override_that_is_no_plain_name_exits_2(with_cache: Deployed, namespace: str) -> None:
    result = launch(with_cache, "engine", KV_PERSIST_NAMESPACE=namespace)
    assert result.returncode == 2
    assert "STUB" not in result.stdout
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["WARNING", "ERROR"]


def test_exported_variables_win_over_the_files_with_stub_engine(deployed: Deployed) -> None:
    deployed.render()
    result = launch(
        deployed, "engine", KV_PERSIST="0", MAX_MODEL_LEN="77", VLLM_CPU_KVCACHE_SPACE="9", HF_HUB_OFFLINE="0"
    )
    report = stub_report(result.stdout)
    assert option(report, "--max-model-len") == "77"
    assert report["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert report["environment"]["HF_HUB_OFFLINE"] == "0"


def test_an_exported_value_that_is_wrong_exits_2_naming_the_variable(deployed: Deployed) -> None:
    deployed.render()
    assert "vllm_engine_max_model_len must be a whole number, not 'lots'" in one_error(
        launch(deployed, "engine", KV_PERSIST="0", MAX_MODEL_LEN="lots"), 2
    )


def test_an_exported_port_of_one_side_only_exits_2_naming_both(deployed: Deployed) -> None:
    deployed.render()
    line = one_error(launch(deployed, "engine", KV_PERSIST_PORT="7777"), 2)
    assert "KV_PERSIST_PORT is '7777'" in line
    assert "set kvp_cache_port in the inventory" in line


def test_the_variant_of_the_command_line_wins(deployed: Deployed) -> None:
    deployed.render()
    assert "vllm_engine_variant uva needs kvp_device cuda" in one_error(
        launch(deployed, "engine", "--variant", "uva", KV_PERSIST="0"), 2
    )


def test_cache_becomes_the_stub_cache_and_makes_its_folder_private(deployed: Deployed) -> None:
    deployed.render()
    result = launch(deployed, "cache")
    assert (result.returncode, result.stderr) == (0, "")
    report = stub_report(result.stdout)
    assert report["argv"][:4] == [f"{deployed.venv}/bin/python", "-m", "lmcache.cli.main", "server"]
    assert option(report, "--port") == str(deployed.settings["kvp_cache_port"])
    assert report["environment"]["LMCACHE_TRACK_USAGE"] == "false"
    assert (deployed.root / "l2").stat().st_mode & 0o777 == 0o700


def test_cache_with_slots_allocates_their_file_before_the_stub_cache_starts(deployed: Deployed) -> None:
    deployed.settings.update(cache_server_l2_backend="raw_block", kvp_cache_budget_gb=0.01)
    deployed.render()
    result = launch(deployed, "cache")
    assert (result.returncode, result.stderr) == (0, "")
    adapter = json.loads(option(stub_report(result.stdout), "--l2-adapter"))
    path = deployed.root / "l2" / "raw-block.data"
    assert (adapter["device_path"], adapter["capacity_bytes"]) == (str(path), path.stat().st_size)
    assert adapter["slot_bytes"] == 2 * 2 * 32 * 2 * 256 + 4096
    assert path.stat().st_mode & 0o777 == 0o600
    assert 9_990_000 < path.stat().st_size <= 10_000_000


def test_a_misspelled_name_in_a_file_exits_2_with_the_right_one(deployed: Deployed) -> None:
    deployed.render()
    deployed.edit_env("tp4.env", "MAX_MODEL_LEN=", "MAX_MODEL_LENGTH=")
    assert "tp4.env's MAX_MODEL_LENGTH is not a setting (did you mean MAX_MODEL_LEN?)" in one_error(
        launch(deployed, "engine"), 2
    )


def test_a_missing_program_exits_3_naming_it(deployed: Deployed) -> None:
    deployed.render()
    (deployed.venv / "bin" / "python").unlink()
    for arguments in (("cache",), ("engine",)):
        line = one_error(launch(deployed, *arguments, KV_PERSIST="0"), 3)
        assert f"starting {deployed.venv}/bin/python: this program is missing" in line


def test_a_program_that_cannot_be_executed_is_one_line(deployed: Deployed) -> None:
    deployed.render()
    program = deployed.venv / "bin" / "python"
    program.unlink()
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    assert str(program) in one_error(launch(deployed, "cache"), 3)


def test_a_cache_folder_that_cannot_be_made_is_one_line(deployed: Deployed) -> None:
    deployed.render()
    Path(deployed.settings["kvp_cache_root"]).write_text("a file", encoding="utf-8")
    assert deployed.settings["kvp_cache_root"] in one_error(launch(deployed, "cache"), 3)


def test_the_launcher_becomes_the_program_instead_of_starting_a_child(deployed: Deployed, spawn: Spawn) -> None:

    deployed.answer()
    deployed.render()
    argv = [sys.executable, "-m", "kvpersist.cli", "launch", "cache", "--config-dir", str(deployed.config_dir)]
    child = spawn(argv, deployed.settings["kvp_cache_port"], env=clean_environment())
    assert Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(os.fsencode(deployed.venv / "bin" / "python"))
