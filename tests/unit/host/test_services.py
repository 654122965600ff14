"""host.services: the Supervisor against a real supervisord, and the whole way to healthy stand-in services.

supervisord is configured by the role's own templates, so these tests cover them as well.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
from kvp_kit import PROJECT, SOURCES, Deployed, clean_environment, stub_report, wait_until
from kvpersist.host.convergence import Action, converge_started, converge_stopped
from kvpersist.host.deployment import load_identity
from kvpersist.host.gate import run_gate
from kvpersist.host.processes import command_line, process
from kvpersist.host.services import (
    CACHE_SERVICE,
    ENGINE_SERVICE,
    ServiceError,
    Supervisor,
    Systemd,
    resolved_manager,
    service_manager,
)

TEMPLATES = PROJECT / "roles" / "kvp_common" / "templates"

pytestmark = pytest.mark.skipif(
    not (Path(sys.prefix) / "bin" / "supervisord").exists(), reason="supervisor is not in this environment"
)


def render(template: str, **variables: object) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  # configuration files, not HTML
        keep_trailing_newline=True,
    )
    return environment.from_string((TEMPLATES / template).read_text(encoding="utf-8")).render(
        ansible_managed="test", **variables
    )


class Supervised(Deployed):
    """A deployment whose home has the real supervisor and the real kvpersist, configured by the role's templates."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "home" / "bin").mkdir(parents=True)
        programs = root / "home" / "venv" / "bin"
        programs.mkdir(parents=True)
        for name in ("supervisord", "supervisorctl"):
            (programs / name).symlink_to(Path(sys.prefix) / "bin" / name)
        (programs / "kvpersist").write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(SOURCES)!r})\n"
            "from kvpersist.cli.main import main\nmain()\n",
            encoding="utf-8",
        )
        (programs / "kvpersist").chmod(0o755)
        for name in ("kvp_state_dir", "kvp_log_dir"):
            Path(self.settings[name]).mkdir()
        self.supervisor_dir = root / "state" / "supervisor"
        (self.supervisor_dir / "conf.d").mkdir(parents=True)
        (self.supervisor_dir / "supervisord.conf").write_text(
            render("supervisord.conf.j2", **self.settings), encoding="utf-8"
        )
        command = root / "home" / "bin" / "kvpersist"
        command.write_text(render("kvpersist.sh.j2", **self.settings), encoding="utf-8")
        command.chmod(0o755)
        self.manager = Supervisor(
            self.settings["kvp_home"], self.settings["kvp_state_dir"], self.settings["kvp_config_dir"]
        )

    def define(self, name: str, command: str) -> None:
        """A program of our own beside the two services."""
        text = f"[program:{name}]\ncommand={command}\nautorestart=unexpected\nstartsecs=0\nstopwaitsecs=5\n"
        (self.supervisor_dir / "conf.d" / f"{name}.conf").write_text(text, encoding="utf-8")

    def define_service(self, name: str, program: str, log: str) -> None:
        service = {"name": name, "program": program, "log": log}
        (self.supervisor_dir / "conf.d" / f"{name}.conf").write_text(
            render("supervisor_program.conf.j2", kvp_common_service=service, **self.settings), encoding="utf-8"
        )

    def log(self, name: str) -> str:
        path = Path(self.settings["kvp_log_dir"]) / name
        return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.fixture
def supervised(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    for name in set(os.environ) - {"PATH", "HOME"}:
        monkeypatch.delenv(name)
    deployment = Supervised(short_folder)
    yield deployment
    deployment.manager.shutdown()


def test_before_anything_is_installed_nothing_runs_and_stopping_is_done(tmp_path: Path) -> None:
    manager = Supervisor(str(tmp_path / "home"), str(tmp_path / "state"), str(tmp_path / "etc"))
    assert not manager.running
    assert manager.pid(CACHE_SERVICE) is None
    assert manager.process(CACHE_SERVICE) is None
    manager.stop(CACHE_SERVICE)
    manager.shutdown()
    with pytest.raises(ServiceError, match=f"killing {CACHE_SERVICE}: it does not run"):
        manager.kill(CACHE_SERVICE)
    with pytest.raises(ServiceError, match=r"supervisord is missing\. Run the playbook"):
        manager.reload()
    assert list(tmp_path.iterdir()) == []


def test_a_supervisor_that_is_installed_but_not_started_runs_nothing(supervised: Supervised) -> None:
    assert not supervised.manager.running
    assert supervised.manager.pid("kvp-one") is None
    supervised.manager.stop("kvp-one")
    supervised.manager.shutdown()


def test_what_a_killed_supervisord_leaves_behind_is_ended_before_it_starts_again(supervised: Supervised) -> None:
    manager, config_dir = supervised.manager, supervised.settings["kvp_config_dir"]
    supervised.define("kvp-one", f"/usr/bin/env KVP_CONFIG_DIR={config_dir} /bin/sleep 1003")
    manager.reload()
    manager.start("kvp-one")
    left_behind = manager.process("kvp-one")
    assert left_behind is not None
    assert manager.orphans() == []
    supervisord = int((supervised.supervisor_dir / "supervisord.pid").read_text(encoding="utf-8"))
    os.kill(supervisord, signal.SIGKILL)
    wait_until(lambda: not manager.running)
    assert manager.orphans() == [left_behind]
    manager.reload()
    assert process(left_behind.pid) != left_behind
    wait_until(lambda: manager.process("kvp-one") is not None)


def test_start_restart_kill_changed_definition_and_shutdown(supervised: Supervised) -> None:
    manager = supervised.manager
    supervised.define("kvp-one", "/bin/sleep 1001")
    manager.reload()
    assert manager.running
    socket = supervised.supervisor_dir / "supervisor.sock"
    assert stat.S_IMODE(socket.stat().st_mode) & 0o077 == 0, "other users must not control the services"

    manager.start("kvp-one")
    first = manager.process("kvp-one")
    assert first is not None
    assert command_line(first.pid) == ["/bin/sleep", "1001"]
    manager.start("kvp-one")
    assert manager.process("kvp-one") == first, "starting a running service must not restart it"

    manager.kill("kvp-one")
    second = wait_until(lambda: manager.process("kvp-one"))
    assert second != first
    assert command_line(second.pid) == ["/bin/sleep", "1001"]

    supervised.define("kvp-one", "/bin/sleep 1002")
    manager.reload()
    assert manager.process("kvp-one") == second, "taking up definitions restarts nothing"
    manager.restart("kvp-one")
    third = manager.process("kvp-one")
    assert third is not None
    assert command_line(third.pid) == ["/bin/sleep", "1002"]

    manager.stop("kvp-one")
    assert manager.process("kvp-one") is None
    with pytest.raises(ServiceError, match="killing kvp-one: it does not run"):
        manager.kill("kvp-one")
    manager.stop("kvp-one")
    manager.start("kvp-one")
    fourth = manager.process("kvp-one")
    assert fourth is not None

    with pytest.raises(ServiceError, match="kvp-unknown"):
        manager.start("kvp-unknown")
    manager.shutdown()
    assert not manager.running
    assert command_line(fourth.pid) is None
    assert manager.pid("kvp-one") is None


def test_services_converge_with_stub_programs(supervised: Supervised) -> None:
    """Settings to launchers to healthy processes to a verified identity, and back to nothing."""
    supervised.answer()
    saved = supervised.save_identity()
    supervised.answer(lmc_version="0.5.6", status={"non_cuda_context_meta": {"1": {"model_name": saved.model_path}}})
    supervised.define_service(CACHE_SERVICE, "cache", "lmcache-server.log")
    manager, deployment = supervised.manager, supervised.deployment

    def converge(name: str, check_mode: bool = False, restart: bool = False) -> Action:
        return converge_started(supervised.deployment, name, saved.namespace, restart, 30, check_mode)

    assert converge("cache", check_mode=True) == Action("started", ("it does not run",))
    assert not manager.running, "check mode must not even start supervisord"
    assert converge("cache") == Action("started", ("it does not run",))
    supervised.define_service(ENGINE_SERVICE, "engine", "vllm-engine.log")
    assert converge("engine") == Action("started", ("it does not run",))
    assert converge("cache") == Action("none")
    assert converge("engine") == Action("none")

    verdict = run_gate(deployment, load_identity(deployment.config_dir))
    assert (verdict.verdict, verdict.differences, verdict.unreadable) == ("verified", (), {})

    log = supervised.log("vllm-engine.log")
    assert "KV_PERSIST=1: cache-identity namespace -> " + saved.model_path in log
    assert set(stub_report(log)["environment"]) & {"PYTHONPATH", "MODEL_DIR", "USER"} == set(), "the service's own only"

    supervised.settings["vllm_engine_max_num_seqs"] = 7
    supervised.render()
    before = manager.process(ENGINE_SERVICE)
    wanted = Action("restarted", ("arguments change from 2 to 7",))
    assert converge("engine", check_mode=True) == wanted
    assert manager.process(ENGINE_SERVICE) == before
    assert converge("engine") == wanted
    assert manager.process(ENGINE_SERVICE) != before
    assert converge("cache") == Action("none"), "a setting of the engine must not restart the cache"

    assert converge("cache", restart=True).action == "restarted"
    both = Action("stopped", (f"{ENGINE_SERVICE} runs", f"{CACHE_SERVICE} runs"))
    assert converge_stopped(deployment, "all", check_mode=True) == both
    assert manager.process(CACHE_SERVICE) is not None
    assert converge_stopped(deployment, "all", check_mode=False) == both
    assert not manager.running
    assert converge_stopped(deployment, "all", check_mode=False) == Action("none")


def test_auto_takes_systemd_exactly_where_it_runs(monkeypatch: pytest.MonkeyPatch, deployed: Deployed) -> None:
    assert resolved_manager("systemd") == "systemd"
    assert resolved_manager("supervisor") == "supervisor"
    for booted, expected in ((True, "systemd"), (False, "supervisor")):
        monkeypatch.setattr(os.path, "isdir", lambda path, booted=booted: path == "/run/systemd/system" and booted)
        assert resolved_manager("auto") == expected
    monkeypatch.undo()
    assert isinstance(service_manager(deployed.deployment), Supervisor)
    deployed.settings["kvp_service_manager"] = "systemd"
    assert isinstance(service_manager(deployed.deployment), Systemd)


def test_a_host_without_systemctl_says_that_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="systemctl is missing"):
        Systemd().pid(CACHE_SERVICE)


def test_systemd_is_asked_for_exactly_these_things_with_stub_systemctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "systemctl"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != show ] || echo 4242\n', encoding="utf-8")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{clean_environment()['PATH']}")
    manager = Systemd()
    manager.reload()
    manager.restart("kvp-one")
    assert manager.pid("kvp-one") == 4242
    manager.shutdown()
    assert (tmp_path / "calls").read_text(encoding="utf-8").splitlines() == [
        "daemon-reload",
        "stop kvp-one",
        "start kvp-one",
        "show --property=MainPID --value kvp-one",
    ]
    stub.write_text("#!/bin/sh\necho 'Unit kvp-one.service\nnot found.' >&2\nexit 5\n", encoding="utf-8")
    with pytest.raises(ServiceError, match=r"starting kvp-one: Unit kvp-one\.service not found"):
        manager.start("kvp-one")
