"""host.health: a service is healthy when its own process answers its port."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvp_kit import Deployed, Spawn, free_ports, start_stub_cache
from kvpersist.host import health
from kvpersist.host.health import Endpoint, NotHealthyError, is_healthy, tail, wait_healthy
from kvpersist.host.processes import Process, process
from kvpersist.host.services import ServiceManager

SERVER = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]


class Shown(ServiceManager):
    """A manager that shows these pids, one per question, the last one for ever."""

    def __init__(self, *pids: int | None) -> None:
        self.pids = list(pids)

    def pid(self, name: str) -> int | None:
        return self.pids.pop(0) if len(self.pids) > 1 else self.pids[0]

    def reload(self) -> None:
        raise AssertionError("looking must not change anything")

    start = stop = reload  # type: ignore[assignment]


class Crashing(Shown):
    """A manager whose service is another process each time."""

    def __init__(self) -> None:
        self.shown = 0

    def process(self, name: str) -> Process:
        self.shown += 1
        return Process(2**22 + self.shown, self.shown)


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    (port,) = free_ports(1)
    return Endpoint("kvp-test", f"http://127.0.0.1:{port}/", port, str(tmp_path / "test.log"))


@pytest.fixture
def server(endpoint: Endpoint, spawn: Spawn, tmp_path: Path) -> subprocess.Popen[bytes]:
    folder = tmp_path / "empty"
    folder.mkdir()
    return spawn([*SERVER, str(endpoint.port)], endpoint.port, stderr=subprocess.DEVNULL, cwd=folder)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_POLL_S", 0.02)
    monkeypatch.setattr(health, "_GIVEN_UP_S", 0.3)


def test_the_service_s_own_process_that_answers_is_healthy(endpoint: Endpoint, server: subprocess.Popen[bytes]) -> None:
    assert is_healthy(Shown(server.pid), endpoint, containerised=False)
    assert wait_healthy(Shown(server.pid), endpoint, False, 5) == process(server.pid)


def test_a_child_of_the_service_that_answers_is_healthy(endpoint: Endpoint, spawn: Spawn, tmp_path: Path) -> None:
    command = f"{' '.join(SERVER)} {endpoint.port} & wait"
    shell = spawn(["/bin/sh", "-c", command], stderr=subprocess.DEVNULL, cwd=tmp_path, start_new_session=True)
    try:
        assert wait_healthy(Shown(shell.pid), endpoint, False, 5) == process(shell.pid)
    finally:
        subprocess.run(["/bin/kill", "-9", "--", f"-{shell.pid}"], check=True)


def test_a_stranger_that_answers_the_port_is_not_healthy(
    endpoint: Endpoint, server: subprocess.Popen[bytes], spawn: Spawn
) -> None:
    ours = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not is_healthy(Shown(ours.pid), endpoint, containerised=False)
    with pytest.raises(NotHealthyError):
        wait_healthy(Shown(ours.pid), endpoint, False, 0.2)


def test_in_a_container_only_the_answer_counts(
    endpoint: Endpoint, server: subprocess.Popen[bytes], spawn: Spawn
) -> None:
    docker = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    assert is_healthy(Shown(docker.pid), endpoint, containerised=True)
    assert not is_healthy(Shown(None), endpoint, containerised=True)


def test_a_port_that_answers_while_the_service_does_not_run_is_not_healthy(
    endpoint: Endpoint, server: subprocess.Popen[bytes]
) -> None:
    assert not is_healthy(Shown(None), endpoint, containerised=False)


def test_a_process_that_does_not_answer_is_waited_for_until_the_time_is_over(endpoint: Endpoint, spawn: Spawn) -> None:
    silent = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    start = time.monotonic()
    with pytest.raises(
        NotHealthyError, match=f"waiting for kvp-test: no healthy answer from {endpoint.url} after 1 s"
    ) as caught:
        wait_healthy(Shown(silent.pid), endpoint, False, 0.6)
    assert time.monotonic() - start >= 0.6, "it must not give up before a process that is there had its time"
    assert str(caught.value).endswith(f"Read {endpoint.log}.")


def test_a_service_that_starts_late_is_waited_for(endpoint: Endpoint, server: subprocess.Popen[bytes]) -> None:
    assert wait_healthy(Shown(None, None, None, server.pid), endpoint, False, 5) == process(server.pid)


def test_a_service_that_keeps_crashing_is_given_up_early_with_the_end_of_its_log(endpoint: Endpoint) -> None:
    Path(endpoint.log).write_text("start\none\ntwo\nCUDA out of memory\n", encoding="utf-8")
    start = time.monotonic()
    with pytest.raises(
        NotHealthyError, match=r"it does not stay up; its log ends: one \| two \| CUDA out of memory\. Read "
    ):
        wait_healthy(Crashing(), endpoint, False, 60)
    assert time.monotonic() - start < 5


def test_a_service_without_any_process_is_given_up_early(endpoint: Endpoint) -> None:
    start = time.monotonic()
    with pytest.raises(NotHealthyError, match=r"it does not stay up\. Read "):
        wait_healthy(Shown(None), endpoint, False, 60)
    assert 0.3 <= time.monotonic() - start < 5


def test_the_end_of_a_large_log_is_read_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 10_000_000 + b"\nlast \xff but one\n\nlast\n")
    assert tail(str(log), 1) == "last"
    assert tail(str(log), 3) == "last \ufffd but one |  | last"
    assert len(tail(str(log), 10)) < 66_000
    assert tail(str(tmp_path / "none")) == ""


def test_the_cache_answers_only_when_its_health_and_its_request_port_do(deployed: Deployed, spawn: Spawn) -> None:
    assert not health.cache_answers(deployed.deployment)
    child = start_stub_cache(deployed, spawn)
    assert health.cache_answers(deployed.deployment)
    deployed.settings["kvp_cache_port"] = free_ports(1)[0]
    assert not health.cache_answers(deployed.deployment), "only the administration port answers"
    child.kill()


def test_endpoints_name_the_logs_and_ports_of_the_deployment(deployed: Deployed) -> None:
    deployment = deployed.deployment
    cache, engine = health.cache_endpoint(deployment), health.engine_endpoint(deployment)
    assert cache.url == f"http://127.0.0.1:{deployed.settings['kvp_cache_http_port']}/healthcheck"
    assert engine.url == f"http://127.0.0.1:{deployed.settings['vllm_engine_port']}/health"
    assert cache.port == deployed.settings["kvp_cache_http_port"]
    assert engine.port == deployed.settings["vllm_engine_port"]
    assert {Path(cache.log).parent, Path(engine.log).parent} == {deployed.root / "log"}
