"""library/kvp_*.py through the real AnsibleModule."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils
import pytest
from ansible.module_utils.testing import patch_module_args
from kvp_kit import PROJECT, SOURCES, Deployed, Spawn, start_stub_cache, start_stub_engine
from kvpersist.host.hashing import HashCache

FILES = ("cache.env.local", "lmcache-server.env", "tp4.env")
MODULES = tuple(sorted(path.stem for path in (PROJECT / "library").glob("kvp_*.py")))

# First, since the environment may hold a link to another checkout.
ansible.module_utils.__path__.insert(0, str(SOURCES))
kvpersist = importlib.import_module("ansible.module_utils.kvpersist")


def test_the_modules_use_the_code_of_this_checkout() -> None:
    assert Path(str(kvpersist.__file__)).is_relative_to(SOURCES)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kvp_library_{name}", PROJECT / "library" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ran:
    """How a module ended: its exit status and the JSON it printed."""

    def __init__(self, status: Any, output: str) -> None:
        self.failed = status != 0
        (line,) = output.strip().splitlines()
        self.result: dict[str, Any] = json.loads(line)
        assert bool(self.result.get("failed")) == self.failed

    def __getitem__(self, key: str) -> Any:
        return self.result[key]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run_module(name: str, check: bool = False, **arguments: Any) -> Ran:
        with (
            patch_module_args({**arguments, "_ansible_check_mode": check, "_ansible_diff": True}),
            pytest.raises(SystemExit) as ended,
        ):
            load(name).main()
        captured = capsys.readouterr()
        assert captured.err == ""
        return Ran(ended.value.code or 0, captured.out)

    return run_module


def fails(ran: Ran, code: int) -> str:
    assert ran.failed
    assert ran["exit_code"] == code
    message: str = ran["msg"]
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def snapshot(root: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mtime_ns if not path.is_dir() else 0,
            str(path.readlink()) if path.is_symlink() else "",
        )
        for path in root.rglob("*")
        if "__pycache__" not in path.parts
    }


def own_keys(ran: Ran) -> dict[str, Any]:
    """The result without what Ansible adds: the arguments, the state of the file that ``path`` names, and warnings,
    which it gathers from all modules of one process."""
    added = {"invocation", "gid", "group", "mode", "owner", "size", "state", "uid", "warnings"}
    return {key: value for key, value in ran.result.items() if key not in added}


def predicted(run: Any, root: Path, name: str, **arguments: Any) -> Ran:
    """Runs check mode, then the real run, asserts that they agree, and that check mode wrote nothing."""
    before = snapshot(root)
    planned = run(name, check=True, **arguments)
    assert snapshot(root) == before
    applied = run(name, **arguments)
    assert own_keys(applied) == own_keys(planned)
    assert applied["changed"] == (snapshot(root) != before)
    return applied


# Every module


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("check", [True, False])
def test_every_wrong_setting_is_named_in_one_line(run: Any, deployed: Deployed, name: str, check: bool) -> None:
    needed = {
        "kvp_env_file": {"file": "tp4.env"},
        "kvp_rollback_info": {"namespace": "kvp-1"},
        "kvp_service": {"service": "cache"},
    }
    arguments: dict[str, Any] = needed.get(name, {})
    deployed.settings.update(kvp_cache_port="many", kvp_unknown=1, kvp_model_dir="relative", kvp_device="tpu")
    before = snapshot(deployed.root)
    message = fails(run(name, check, settings=deployed.settings, **arguments), 2)
    for word in ("kvp_cache_port", "kvp_unknown is not a setting", "kvp_model_dir", "kvp_device must be one of"):
        assert word in message
    assert snapshot(deployed.root) == before


@pytest.mark.parametrize("name", MODULES)
def test_missing_settings_fail_as_ansible_says_it(run: Any, name: str) -> None:
    ran = run(name)
    assert ran.failed
    assert "missing required arguments" in ran["msg"]
    assert "settings" in ran["msg"]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("kvp_model_revision", "main", "must be a full 40-hex SHA"),
        ("kvp_codec", "fp8", "is LOSSY and is not supported"),
        ("kvp_codec", "brotli", "is not a codec of kvpersist"),
        ("kvp_chunk_size", 100, "is not a multiple of vllm_engine_block_size"),
        ("kvp_cache_host", "10.0.0.1", "is not loopback"),
        ("vllm_engine_extra_args", "--port 1", "--port has a variable of their own"),
        ("vllm_engine_extra_args", "'open", "No closing quotation"),
    ],
)
def test_contradicting_settings_are_one_line(
    run: Any, deployed: Deployed, setting: str, value: Any, words: str
) -> None:
    deployed.settings[setting] = value
    assert words in fails(run("kvp_identity", settings=deployed.settings), 2)


# kvp_env_file


@pytest.mark.parametrize("name", FILES)
def test_an_environment_file_is_written_as_predicted_and_only_once(run: Any, deployed: Deployed, name: str) -> None:
    first = predicted(run, deployed.root, "kvp_env_file", settings=deployed.settings, file=name)
    path = deployed.config_dir / name
    assert first["changed"]
    assert first["path"] == str(path)
    assert first["diff"]["before"] == ""
    assert first["diff"]["after"] == path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o600
    again = predicted(run, deployed.root, "kvp_env_file", settings=deployed.settings, file=name)
    assert not again["changed"]


def test_a_changed_setting_changes_exactly_the_files_that_hold_it(run: Any, deployed: Deployed) -> None:
    for name in FILES:
        run("kvp_env_file", settings=deployed.settings, file=name)

    def changed() -> set[str]:
        return {
            name
            for name in FILES
            if predicted(run, deployed.root, "kvp_env_file", settings=deployed.settings, file=name)["changed"]
        }

    deployed.settings["kvp_cache_port"] += 1
    assert changed() == set(FILES)
    deployed.settings["vllm_engine_max_num_seqs"] = 5
    assert changed() == {"tp4.env"}
    assert changed() == set()


def test_a_file_that_others_could_read_is_repaired(run: Any, deployed: Deployed) -> None:
    run("kvp_env_file", settings=deployed.settings, file="tp4.env")
    path = deployed.config_dir / "tp4.env"
    path.chmod(0o644)
    ran = run("kvp_env_file", settings=deployed.settings, file="tp4.env")
    assert ran["changed"]
    assert ran["diff"]["before"].startswith("# mode 0644\n")
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_unknown_file_is_refused(run: Any, deployed: Deployed) -> None:
    ran = run("kvp_env_file", settings=deployed.settings, file="other.env")
    assert ran.failed
    assert "value of file must be one of: cache.env.local, lmcache-server.env, tp4.env, got: other.env" in ran["msg"]


def test_a_configuration_folder_that_is_a_file_is_one_line(run: Any, deployed: Deployed) -> None:
    deployed.config_dir.write_text("a file", encoding="utf-8")
    message = fails(run("kvp_env_file", settings=deployed.settings, file="tp4.env"), 2)
    assert f"writing {deployed.config_dir}/tp4.env: " in message


# kvp_identity


def test_an_identity_is_saved_as_predicted_and_only_once(run: Any, deployed: Deployed) -> None:
    first = predicted(run, deployed.root, "kvp_identity", settings=deployed.settings)
    assert first["changed"]
    assert first["differences"] == []
    assert Path(first["model_path"]).readlink() == deployed.model
    headers = [entry["after_header"] for entry in first["diff"]]
    assert headers == [first["model_path"], f"{deployed.config_dir}/identity.env.local"]
    assert first["diff"][1]["after"] == (deployed.config_dir / "identity.env.local").read_text(encoding="utf-8")
    again = predicted(run, deployed.root, "kvp_identity", settings=deployed.settings)
    assert not again["changed"]
    assert again["diff"] == []
    assert again["namespace"] == first["namespace"]


def test_differences_from_the_saved_identity_are_returned_with_both_values(run: Any, deployed: Deployed) -> None:
    first = run("kvp_identity", settings=deployed.settings)
    deployed.settings.update(vllm_engine_kv_cache_dtype="fp8", vllm_engine_max_model_len=1024)
    second = predicted(run, deployed.root, "kvp_identity", settings=deployed.settings)
    assert second["differences"] == [
        {"name": "kv_cache_dtype", "old": "bfloat16", "new": "fp8"},
        {"name": "max_model_len", "old": 512, "new": 1024},
    ]
    assert second["namespace"] != first["namespace"]
    assert [entry["after_header"] for entry in second["diff"]] == [
        second["model_path"],
        f"{deployed.config_dir}/identity.env.local",
    ]
    assert Path(first["model_path"]).is_symlink(), "earlier links stay"


def test_a_distrusted_hash_cache_is_not_used(run: Any, deployed: Deployed) -> None:
    right = run("kvp_identity", settings=deployed.settings)
    cache = HashCache(str(deployed.root / "state" / "hash-cache.jsonl"), keep=True)
    for shard in deployed.model.glob("*.safetensors"):
        cache.remember(str(shard), shard.stat(), "0" * 64, sys.maxsize)
    assert run("kvp_identity", settings=deployed.settings)["namespace"] != right["namespace"]
    assert run("kvp_identity", settings=deployed.settings, trust_hash_cache=False)["namespace"] == right["namespace"]


@pytest.mark.parametrize("check", [True, False])
def test_a_broken_model_fails_in_one_line_and_writes_nothing(run: Any, deployed: Deployed, check: bool) -> None:
    (deployed.model / "config.json").write_text("{", encoding="utf-8")
    before = snapshot(deployed.root)
    message = fails(run("kvp_identity", check, settings=deployed.settings), 2)
    assert f"{deployed.model}/config.json: it is not JSON" in message
    assert snapshot(deployed.root) == before


def test_missing_lmcache_fails_with_the_code_of_preflight(run: Any, deployed: Deployed) -> None:
    (site,) = (deployed.venv / "lib").glob("python3*/site-packages")
    (site / "lmcache-0.5.6.dist-info").rmdir()
    assert "LMCache" in fails(run("kvp_identity", settings=deployed.settings), 3)


def test_a_state_folder_that_is_a_file_does_not_stop_the_identity(run: Any, deployed: Deployed) -> None:
    Path(deployed.settings["kvp_state_dir"]).write_text("a file", encoding="utf-8")
    assert not run("kvp_identity", settings=deployed.settings).failed
    assert Path(deployed.settings["kvp_state_dir"]).read_text(encoding="utf-8") == "a file"


def test_a_changed_namespace_is_explained(run: Any, deployed: Deployed) -> None:
    first = run("kvp_identity", settings=deployed.settings)
    assert first["explanation"] is None
    assert first["sources"]["engine_build"] == "engine"
    deployed.settings["vllm_engine_max_model_len"] = 1024
    second = predicted(run, deployed.root, "kvp_identity", settings=deployed.settings)
    explanation = second["explanation"]
    assert (explanation["old"], explanation["new"]) == (first["namespace"], second["namespace"])
    assert explanation["lines"][1].startswith("max_model_len: 512 -> 1024. ")
    assert run("kvp_identity", settings=deployed.settings)["explanation"] is None


# kvp_rollback_info


@pytest.mark.parametrize("check", [True, False])
def test_an_earlier_deployment_is_returned_with_what_differs(run: Any, deployed: Deployed, check: bool) -> None:
    for name in FILES:
        run("kvp_env_file", settings=deployed.settings, file=name)
    first = run("kvp_identity", settings=deployed.settings)["namespace"]
    deployed.settings["vllm_engine_max_model_len"] = 1024
    run("kvp_identity", settings=deployed.settings)
    before = snapshot(deployed.root)
    ran = run("kvp_rollback_info", check, settings=deployed.settings, namespace=first)
    assert (ran.failed, ran["changed"], ran["namespace"]) == (False, False, first)
    assert ran["values"]["vllm_engine_max_model_len"] == 512
    assert ran["differences"] == [{"name": "vllm_engine_max_model_len", "now": 1024, "then": 512}]
    assert snapshot(deployed.root) == before


def test_a_rollback_to_an_unknown_namespace_or_without_the_model_is_one_line(run: Any, deployed: Deployed) -> None:
    deployed.render()
    namespace = run("kvp_identity", settings=deployed.settings)["namespace"]
    message = fails(run("kvp_rollback_info", settings=deployed.settings, namespace="kvp-1"), 2)
    assert f"no deployment of this host had it (known: {namespace})" in message
    deployed.model.rename(deployed.root / "away")
    message = fails(run("kvp_rollback_info", settings=deployed.settings, namespace=namespace), 2)
    assert f"reading the model folder {deployed.model}: it is not a folder" in message


# kvp_gate


@pytest.fixture
def running(deployed: Deployed, spawn: Spawn) -> Deployed:
    saved = deployed.save_identity()
    start_stub_cache(deployed, spawn)
    deployed.answer(lmc_version="0.5.6", status={"model_name": saved.model_path})
    start_stub_engine(deployed, spawn, saved.namespace)
    return deployed


@pytest.mark.parametrize("check", [True, False])
def test_the_gate_verifies_stub_services_and_changes_nothing(run: Any, running: Deployed, check: bool) -> None:
    before = snapshot(running.root)
    ran = run("kvp_gate", check, settings=running.settings)
    assert (ran.failed, ran["changed"], ran["verdict"], ran["exit_code"]) == (False, False, "verified", 0)
    assert "kv_cache_dtype" in ran["checked"]
    assert snapshot(running.root) == before


def test_the_gate_fails_on_a_mismatch_naming_field_and_both_values(run: Any, running: Deployed) -> None:
    running.edit_env("identity.env.local", "KVP_MAX_MODEL_LEN=512", "KVP_MAX_MODEL_LEN=513")
    ran = run("kvp_gate", settings=running.settings)
    message = fails(ran, 4)
    assert "MISMATCH max_model_len: identity 513, running 512." in message
    assert "must not be reused" in message
    assert ran["verdict"] == "mismatch"
    assert {"name": "max_model_len", "identity": 513, "running": 512} in ran["differences"]
    assert not ran["changed"]


def test_the_gate_fails_when_it_cannot_read_saying_what_to_do(run: Any, deployed: Deployed) -> None:
    deployed.save_identity()
    ran = run("kvp_gate", settings=deployed.settings)
    message = fails(ran, 5)
    assert ran["verdict"] == "inconclusive"
    assert ran["unreadable"]["block_size"]["fix"].startswith("Start kvp-vllm-engine")
    assert "INCONCLUSIVE block_size: no process that can be seen listens" in message


def test_the_gate_without_an_identity_is_one_line(run: Any, deployed: Deployed) -> None:
    assert "identity.env.local: no such file" in fails(run("kvp_gate", settings=deployed.settings), 5)


# kvp_l2_file


def test_the_file_of_slots_is_allocated_as_predicted_and_only_once(run: Any, deployed: Deployed) -> None:
    (deployed.root / "l2").mkdir()
    assert own_keys(predicted(run, deployed.root, "kvp_l2_file", settings=deployed.settings)) == {"changed": False}
    deployed.settings["cache_server_l2_backend"] = "raw_block"
    first = predicted(run, deployed.root, "kvp_l2_file", settings=deployed.settings)
    assert first["path"] == f"{deployed.root}/l2/raw-block.data"
    assert first["diff"]["after"] == "999424 bytes, mode 0600\n"
    assert not predicted(run, deployed.root, "kvp_l2_file", settings=deployed.settings)["changed"]
    deployed.settings["kvp_cache_budget_gb"] = 0.002
    assert predicted(run, deployed.root, "kvp_l2_file", settings=deployed.settings)["changed"]


def test_check_mode_predicts_the_file_of_slots_where_its_folder_is_missing_too(run: Any, deployed: Deployed) -> None:
    deployed.settings["cache_server_l2_backend"] = "raw_block"
    assert run("kvp_l2_file", True, settings=deployed.settings)["changed"]
    assert "allocating 999424 bytes" in fails(run("kvp_l2_file", settings=deployed.settings), 2)


# kvp_preflight_info


def test_preflight_lists_unknown_variables_and_wrong_values_in_one_line(run: Any, deployed: Deployed) -> None:
    deployed.settings["kvp_device"] = "tpu"
    variables = [*deployed.settings, "kvp_settings", "kvp_chunksize", "vllm_engine_prot"]
    message = fails(run("kvp_preflight_info", settings=deployed.settings, variables=variables), 2)
    assert "kvp_chunksize is not a setting (did you mean kvp_chunk_size?)" in message
    assert "vllm_engine_prot is not a setting (did you mean vllm_engine_port?)" in message
    assert "kvp_device must be one of" in message
    assert "kvp_settings" not in message


def test_preflight_warns_of_a_budget_that_is_not_kept(run: Any, deployed: Deployed) -> None:
    deployed.settings["cache_server_l2_backend"] = "fs"
    ran = run("kvp_preflight_info", settings=deployed.settings)
    assert ran["problems"] == []
    assert "are not kept by fs" in str(ran["warnings"])


@pytest.mark.parametrize("check", [True, False])
def test_preflight_lists_problems_and_never_changes(run: Any, deployed: Deployed, check: bool) -> None:
    assert run("kvp_preflight_info", check, settings=deployed.settings)["problems"] == []
    (deployed.model / "tokenizer.json").unlink()
    before = snapshot(deployed.root)
    with socket.create_server(("127.0.0.1", deployed.settings["vllm_engine_port"])):
        ran = run("kvp_preflight_info", check, settings=deployed.settings)
    assert not ran.failed
    assert not ran["changed"]
    assert ran["service_manager"] == "supervisor"
    assert ["tokenizer" in ran["problems"][0], "vllm_engine_port" in ran["problems"][1]] == [True, True]
    assert len(ran["problems"]) == 2
    assert snapshot(deployed.root) == before


# kvp_service


def test_check_mode_predicts_a_start_and_does_nothing(run: Any, deployed: Deployed) -> None:
    deployed.save_identity()
    before = snapshot(deployed.root)
    for service in ("cache", "engine"):
        ran = run("kvp_service", True, settings=deployed.settings, service=service)
        assert (ran["changed"], ran["action"], ran["reasons"]) == (True, "started", ["it does not run"])
        assert ran["diff"] == {"before": "", "after": "it does not run\n"}
    assert snapshot(deployed.root) == before


def test_stopping_what_does_not_run_is_no_change(run: Any, deployed: Deployed) -> None:
    ran = predicted(run, deployed.root, "kvp_service", settings=deployed.settings, service="all", state="stopped")
    assert (ran["changed"], ran["action"]) == (False, "none")


def test_starting_all_is_refused_in_one_line(run: Any, deployed: Deployed) -> None:
    assert "Start cache and engine one by one" in fails(
        run("kvp_service", settings=deployed.settings, service="all"), 2
    )


def test_starting_without_an_installation_is_one_line(run: Any, deployed: Deployed) -> None:
    message = fails(run("kvp_service", settings=deployed.settings, service="cache", timeout=1), 1)
    assert "supervisord is missing. Run the playbook to install it." in message


# kvp_recovery


def test_recovery_in_check_mode_says_that_it_would_restart_and_does_nothing(run: Any, deployed: Deployed) -> None:
    deployed.save_identity()
    before = snapshot(deployed.root)
    ran = run("kvp_recovery", True, settings=deployed.settings, scenarios=["B"])
    assert (ran.failed, ran["changed"], ran["msg"]) == (False, True, "would restart the services for B")
    assert snapshot(deployed.root) == before


def test_recovery_of_a_deployment_without_the_cache_is_refused(run: Any, deployed: Deployed) -> None:
    deployed.settings["vllm_engine_kv_persist"] = False
    message = fails(run("kvp_recovery", settings=deployed.settings), 2)
    assert "the cache is not attached" in message


def test_recovery_of_an_unknown_scenario_is_refused(run: Any, deployed: Deployed) -> None:
    ran = run("kvp_recovery", settings=deployed.settings, scenarios=["A", "C"])
    assert ran.failed
    assert "value of scenarios must be one or more of: A, B" in ran["msg"]


def test_recovery_without_services_fails_in_one_line_and_keeps_the_evidence(run: Any, deployed: Deployed) -> None:
    deployed.save_identity()
    message = fails(run("kvp_recovery", settings=deployed.settings, timeout=1), 1)
    assert "kvp-" in message or "engine" in message
    (result,) = (deployed.root / "state" / "results").glob("*/recovery.json")
    content = json.loads(result.read_text(encoding="utf-8"))
    assert content["verdict"] == "INCONCLUSIVE"
    assert content["error"] == message
