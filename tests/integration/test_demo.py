"""What `make demo` promises, on the real programs. The tests run in this order and share one deployment."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Demo

pytestmark = pytest.mark.integration

START = "kvp_common : Start the service, or restart it where it runs with other arguments"


def last_result(demo: Demo) -> dict:
    run = demo.kvpersist("recover", "--last", "--json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def edited(demo: Demo) -> Iterator[Path]:
    """identity.env.local, put back afterwards."""
    path = demo.config / "identity.env.local"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_recovery_passes_with_all_its_evidence(demo: Demo) -> None:
    result = last_result(demo)
    assert result["verdict"] == "PASS"
    assert [outcome["scenario"] for outcome in result["outcomes"]] == ["A", "B"]
    a, b = result["restarts"]
    assert a["answer"]["cached_tokens"] > 0
    assert b["answer"]["cached_tokens"] > 0
    assert b["l2_tokens"] > 0
    assert b["l2_keys"] > 0
    assert b["cache_replaced"]
    assert not a["cache_replaced"]
    assert a["answer"]["text"] == b["answer"]["text"] == result["cold"]["text"]
    assert "Paris" in result["cold"]["text"]
    # The page cache was dropped, so the bytes came from the disk and the process's own counter shows it.
    assert b["process_bytes"] >= result["store"]["bytes_after"] - result["store"]["bytes_before"]


def test_the_table_says_what_the_result_says(demo: Demo) -> None:
    run = demo.kvpersist("recover", "--last")
    result = last_result(demo)
    assert result["namespace"] in run.stdout
    assert str(result["restarts"][1]["l2_tokens"]) in run.stdout
    assert run.stdout.count("PASS") == 3


def test_a_second_run_changes_nothing(demo: Demo) -> None:
    assert demo.changes() == []


def test_check_mode_on_a_deployed_host_predicts_no_change(demo: Demo) -> None:
    assert demo.changes("--check", "--diff") == []


@pytest.mark.parametrize(
    ("variable", "file", "services"),
    [
        ("vllm_engine_max_num_seqs=3", "tp4.env", 1),
        ("kvp_cache_device=none0", "cache.env.local", 0),  # nothing that runs depends on it
    ],
)
def test_check_mode_names_exactly_what_a_run_changes(demo: Demo, variable: str, file: str, services: int) -> None:
    predicted = demo.changes("--check", "-e", variable)
    assert predicted == [f"kvp_common : Render the settings: {file}", *[START] * services]
    assert demo.changes("-e", variable) == predicted
    assert demo.changes("-e", variable) == []
    demo.changes()


def test_one_variable_moves_both_sides_to_another_port(demo: Demo) -> None:
    port = ("-e", "kvp_cache_port=15556")
    predicted = demo.changes("--check", *port)
    files = ("cache.env.local", "lmcache-server.env", "tp4.env")
    # Both services: the engine registers anew with a server that starts anew.
    assert predicted == [*(f"kvp_common : Render the settings: {file}" for file in files), START, START]
    assert demo.changes(*port) == predicted
    for file in files:
        assert "=15556" in (demo.config / file).read_text()
    gate = demo.kvpersist("gate", "--json")
    assert gate.returncode == 0, gate.stdout
    assert "cache_address" in json.loads(gate.stdout)["checked"]
    recovered = demo.kvpersist("recover", "--scenario", "A", "--prompt-tokens", "3000")
    assert recovered.returncode == 0, recovered.stdout + recovered.stderr
    demo.changes()


def test_gate_verifies_the_deployed_engine(demo: Demo) -> None:
    run = demo.kvpersist("gate", "--json")
    assert run.returncode == 0, run.stdout
    verdict = json.loads(run.stdout)
    assert verdict["verdict"] == "verified"
    assert {"kv_cache_dtype", "weights_sha256", "block_size", "lmcache_server_version"} <= set(verdict["checked"])


def test_gate_names_the_field_and_both_values(demo: Demo, edited: Path) -> None:
    edited.write_text(edited.read_text().replace("KVP_KV_CACHE_DTYPE=bfloat16", "KVP_KV_CACHE_DTYPE=fp8"))
    run = demo.kvpersist("gate")
    assert run.returncode == 4
    assert "MISMATCH kv_cache_dtype: identity 'fp8', running 'bfloat16'" in run.stdout


def test_gate_is_inconclusive_without_config_json(demo: Demo) -> None:
    path = next((demo.home / "models").glob("smollm2/config.json"))
    hidden = path.with_suffix(".away")
    path.rename(hidden)
    try:
        run = demo.kvpersist("gate")
    finally:
        hidden.rename(path)
    assert run.returncode == 5
    assert re.search(r"INCONCLUSIVE kv_geometry: .*config\.json", run.stdout)


def test_a_run_heals_what_a_crash_of_the_cache_server_alone_leaves(demo: Demo) -> None:
    pid = int(demo.supervisorctl("pid", "kvp-lmcache-server"))
    os.kill(pid, signal.SIGKILL)
    assert demo.changes() == [START]  # the engine registers with the server that supervisor has started
    assert demo.kvpersist("gate").returncode == 0
    assert demo.changes() == []


def test_a_run_replaces_a_damaged_identity(demo: Demo, edited: Path) -> None:
    edited.write_bytes(bytes(range(256)))
    assert demo.changes() == ["identity : Hash the model and derive the identity"]
    assert demo.kvpersist("gate").returncode == 0


def test_config_json_is_part_of_the_identity_as_a_whole(demo: Demo) -> None:
    path = next((demo.home / "models").glob("smollm2/config.json"))
    before = path.read_text()
    path.write_text(before.replace('"rms_norm_eps"', '"rms_norm_eps": 0.5, "former_eps"'))
    try:
        run = demo.kvpersist("gate")
    finally:
        path.write_text(before)
    assert run.returncode == 4
    assert "MISMATCH model_config_sha256" in run.stdout


def test_launcher_refuses_to_start_another_identity(demo: Demo) -> None:
    run = demo.kvpersist("launch", "engine", MAX_MODEL_LEN="2048")
    assert run.returncode == 4
    assert run.stderr.startswith("ERROR: ")
    assert "max_model_len" in run.stderr


def test_launcher_without_a_cache_says_what_to_start(demo: Demo) -> None:
    run = demo.kvpersist("launch", "engine", LMCACHE_HTTP_PORT="1", KVP_LMCACHE_HTTP_PORT="1")
    assert run.returncode == 3
    assert run.stderr.count("\n") == 1
    assert "Start it first: kvpersist launch cache" in run.stderr


def test_the_engine_runs_plainly_with_kv_persist_off_and_comes_back(demo: Demo) -> None:
    demo.changes("-e", "vllm_engine_kv_persist=false")
    gate = demo.kvpersist("gate")
    assert gate.returncode == 5
    assert "the engine runs without --kv-transfer-config" in gate.stdout
    demo.changes()
    assert demo.kvpersist("gate").returncode == 0


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("kvp_model_dir=/nowhere", "The model folder /nowhere does not exist"),
        ("kvp_model_revision=main", "KVP_MODEL_REVISION must be a full 40-hex SHA"),
        ("kvp_codec=fp8", "LMCACHE_L2_SERDE=fp8 is LOSSY and is not supported"),
        ("kvp_codec=brotli", "LMCACHE_L2_SERDE=brotli is not a codec of kvpersist"),
        ("kvp_cache_budget_gb=10000000", "Lower kvp_cache_budget_gb or use a larger disk"),
        ("kvp_cache_port=70000", "kvp_cache_port must be at most 65535"),
        ("cache_server_venv=/nowhere", "ERROR: lmcache CLI missing"),
        ("kvp_cache_budgt_gb=3", "kvp_cache_budgt_gb is not a setting (did you mean kvp_cache_budget_gb?)"),
    ],
)
def test_bad_input_stops_in_preflight_with_one_line(demo: Demo, variable: str, line: str) -> None:
    before = {path: path.read_bytes() for path in demo.config.iterdir()}
    run = demo.playbook("-e", variable)
    assert run.returncode != 0
    assert line in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert {path: path.read_bytes() for path in demo.config.iterdir()} == before


def test_preflight_names_a_port_that_a_stranger_holds(demo: Demo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        run = demo.playbook("--tags", "preflight", "-e", f"vllm_engine_port={port}")
    assert run.returncode != 0
    assert f"Port {port} is taken by a program that is not kvp-vllm-engine" in run.stdout + run.stderr
