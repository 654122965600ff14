"""host.convergence: what a running process lacks, and what check mode leaves alone. The whole way: test_services.py."""

from __future__ import annotations

import sys

import pytest
from kvp_kit import Deployed, Spawn
from kvpersist.core.errors import InconclusiveError, UsageError
from kvpersist.host.convergence import Action, converge_started, converge_stopped, deviations, wanted_command
from kvpersist.host.processes import Process, process
from kvpersist.host.services import CACHE_SERVICE, ENGINE_SERVICE

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def running(spawn: Spawn, arguments: list[str], environment: dict[str, str]) -> Process:
    found = process(spawn([*SLEEP, *arguments], env=environment).pid)
    assert found is not None
    return found


def test_a_process_with_the_wanted_arguments_and_environment_is_in_line(spawn: Spawn) -> None:
    found = running(spawn, ["--port", "1", "", "--json", '{"a": "b c"}', ""], {"A": "1", "B": "x=y\nz", "OTHER": "2"})
    wanted = [*SLEEP, "--port", "1", "", "--json", '{"a": "b c"}', ""]
    assert deviations(found, wanted, {"A": "1", "B": "x=y\nz"}) == []


def test_each_deviation_is_named_with_both_values(spawn: Spawn) -> None:
    found = running(spawn, ["--port", "1", "--old"], {"A": "1"})
    words = deviations(found, [*SLEEP, "--port", "2"], {"A": "3", "B": "4"})
    assert words == [
        "arguments change from 1 --old to 2",
        "A changes from '1' to '3'",
        "B changes from None to '4'",
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(["--a"], ["--a", "--b"]), (["--a", "--b"], ["--a"]), (["1", "2"], ["2", "1"]), (["--a", "--a"], ["--a"])],
    ids=["added", "removed", "other-order", "given-once-less"],
)
def test_any_other_argument_list_is_a_deviation(spawn: Spawn, arguments: list[str], wanted: list[str]) -> None:
    found = running(spawn, arguments, {})
    (word,) = deviations(found, [*SLEEP, *wanted], {})
    assert word.startswith("arguments change ")
    assert word != "arguments change from nothing to nothing"


def test_a_process_that_is_gone_is_not_in_line() -> None:
    assert deviations(Process(2**22 + 1, 1), SLEEP, {}) == ["its arguments cannot be read"]


def test_wanted_cache_with_slots_knows_the_size_of_an_object(deployed: Deployed) -> None:
    deployed.settings.update(cache_server_l2_backend="raw_block", kvp_cache_budget_gb=0.01)
    argv, environment = wanted_command(deployed.deployment, CACHE_SERVICE, None)
    assert f'"slot_bytes":{2 * 2 * 32 * 2 * 256 + 4096}' in argv[-1]
    assert "PYTHONPATH" not in environment


def test_wanted_engine_takes_the_namespace_that_is_given_or_that_of_the_saved_identity(deployed: Deployed) -> None:
    saved = deployed.save_identity()
    deployment = deployed.deployment
    argv, environment = wanted_command(deployment, ENGINE_SERVICE, None)
    assert argv[argv.index("--model") + 1] == saved.model_path
    assert environment["HF_HUB_OFFLINE"] == "1"
    argv, _ = wanted_command(deployment, ENGINE_SERVICE, "kvp-other")
    assert argv[argv.index("--model") + 1] == f"{deployed.root}/models/tiny/kvp-other"
    argv, _ = wanted_command(deployment, CACHE_SERVICE, None)
    assert argv[:4] == [f"{deployed.venv}/bin/python", "-m", "lmcache.cli.main", "server"]


def test_an_engine_without_the_cache_needs_no_identity(deployed: Deployed) -> None:
    deployed.settings["vllm_engine_kv_persist"] = False
    argv, _ = wanted_command(deployed.deployment, ENGINE_SERVICE, "kvp-ignored")
    assert argv[argv.index("--model") + 1] == str(deployed.model)
    assert "--kv-transfer-config" not in argv


def test_an_engine_with_the_cache_and_without_an_identity_says_what_to_run(deployed: Deployed) -> None:
    with pytest.raises(InconclusiveError, match=r"reading .*identity\.env\.local: no such file"):
        wanted_command(deployed.deployment, ENGINE_SERVICE, None)


def test_check_mode_predicts_a_start_and_does_nothing(deployed: Deployed) -> None:
    before = sorted(deployed.root.rglob("*"))
    action = converge_started(deployed.deployment, "cache", None, restart=False, timeout_s=1, check_mode=True)
    assert action.as_result() == {
        "changed": True,
        "action": "started",
        "reasons": ["it does not run"],
        "diff": {"before": "", "after": "it does not run\n"},
    }
    assert sorted(deployed.root.rglob("*")) == before


def test_an_action_that_is_none_changes_nothing_and_has_no_diff() -> None:
    assert Action("none").as_result() == {"changed": False, "action": "none", "reasons": [], "diff": {}}


@pytest.mark.parametrize("check_mode", [True, False])
def test_stopping_what_does_not_run_changes_nothing(deployed: Deployed, check_mode: bool) -> None:
    for name in ("cache", "engine", "all"):
        assert converge_stopped(deployed.deployment, name, check_mode) == Action("none")


def test_all_services_cannot_be_started_at_once(deployed: Deployed) -> None:
    with pytest.raises(UsageError, match=r"'all' is not one service. Start cache and engine one by one"):
        converge_started(deployed.deployment, "all", None, restart=False, timeout_s=1, check_mode=True)
