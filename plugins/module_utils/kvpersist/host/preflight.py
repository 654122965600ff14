"""What must hold on a host before anything is deployed there. Looks only, and finds every problem at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable

from ..core.commands import l2_adapter_config
from ..core.deployment import Deployment
from ..core.errors import KvpError
from ..core.l2_backends import BACKENDS
from .environments import distribution_version, engine_build, lmcache_version
from .identity import check_model_path
from .l2_tier import cache_server, held_bytes
from .model_folder import check_model
from .processes import Process, descends_from, listener, port_is_taken
from .services import CACHE_SERVICE, ENGINE_SERVICE, ServiceManager, resolved_manager

# sockaddr_un holds 108 bytes with the closing NUL (unix(7)); supervisord binds a name with its pid appended first.
_LONGEST_SOCKET_PATH = 97
_CODEC_PACKAGES = {"zstd": "zstandard", "lz4": "lz4"}
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs", "lustre")


def preflight_problems(deployment: Deployment, manager: ServiceManager) -> list[str]:
    """Problems of this host, each a line with what to do about it; empty when it is ready."""
    return [
        *_paths(deployment),
        *_programs(deployment),
        *_model(deployment),
        *_disk(deployment),
        *_ports_of_strangers(deployment, manager),
    ]


def preflight_warnings(deployment: Deployment) -> list[str]:
    """What an operator should know and may accept."""
    cache = deployment.cache
    warnings = []
    unkept = BACKENDS[cache.l2_backend].unkept_budget
    if unkept:
        warnings.append(
            f"kvp_cache_budget_gb and kvp_cache_min_free_gb are not kept by {cache.l2_backend}: {unkept}. Give "
            f"{cache.root} a filesystem of its own, or set cache_server_l2_backend to kvpersist."
        )
    _, others = held_bytes(cache)
    if others:
        warnings.append(
            f"{others / 1e9:.3f} GB in {cache.root} are not of {cache.l2_backend}, which never removes them. Remove "
            "what another L2 backend has left there."
        )
    return warnings


def _paths(deployment: Deployment) -> Iterable[str]:
    """Paths that would be too long once they end up in a file name of the disk tier or in a socket's address."""
    try:
        check_model_path(deployment, deployment.engine.namespace_override or "kvp-" + "0" * 32)
    except KvpError as error:
        yield str(error)
    socket = f"{deployment.state_dir}/supervisor/supervisor.sock"
    if resolved_manager(deployment.service_manager) == "supervisor" and len(os.fsencode(socket)) > _LONGEST_SOCKET_PATH:
        yield f"{socket} is longer than the {_LONGEST_SOCKET_PATH} bytes of a socket's path. Shorten kvp_state_dir."


def _programs(deployment: Deployment) -> Iterable[str]:
    if deployment.cache.launch_mode == "docker":
        if shutil.which("docker") is None:
            yield "docker is missing. Install Docker, or set kvp_launch_mode to host."
        return
    for venv, version_of in ((deployment.cache.venv, lmcache_version), (deployment.engine.venv, engine_build)):
        try:
            version_of(venv)
        except KvpError as error:
            yield str(error)
    for venv in dict.fromkeys((deployment.cache.venv, deployment.engine.venv)):
        if os.path.isdir(venv) and not os.access(f"{venv}/bin/python", os.X_OK):
            yield f"{venv}/bin/python is missing or cannot be run. Make the virtual environment again."
    yield from _full_cli(deployment.cache.venv)
    package = _CODEC_PACKAGES.get(deployment.cache.codec)
    if package and distribution_version(deployment.cache.venv, package) is None:
        yield f"CodecError: {package} python bindings not installed in {deployment.cache.venv}. Install {package}."
    backend = deployment.cache.l2_backend
    package = BACKENDS[backend].package
    if package and distribution_version(deployment.cache.venv, package) is None:
        name = package.replace("_", "-")
        yield f"{backend} needs {name}, which is not installed in {deployment.cache.venv}. Install {name} there."


def _full_cli(venv: str) -> Iterable[str]:
    """LMCache's command silently becomes a light one without a server when one of its dependencies is missing."""
    python = f"{venv}/bin/python"
    if not os.access(python, os.X_OK):
        return
    try:
        result = subprocess.run(  # the deployment's own interpreter
            [python, "-m", "lmcache.cli.main", "server", "--help"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"},
        )
    except subprocess.TimeoutExpired:
        yield f"lmcache server --help in {venv} gives no answer in 120 s. Check the environment."
        return
    if "--l2-adapter" not in result.stdout:
        end = " ".join((result.stderr or result.stdout).split())[-300:]
        yield f"lmcache in {venv} has no server (a dependency is missing): {end}. Install its full requirements."


def _model(deployment: Deployment) -> Iterable[str]:
    folder = deployment.engine.model_dir
    if not os.path.isdir(folder):
        yield f"The model folder {folder} does not exist. Set kvp_model_dir."
        return
    try:
        yield from check_model(deployment)
        l2_adapter_config(cache_server(deployment))
    except KvpError as error:
        yield str(error)


def _disk(deployment: Deployment) -> Iterable[str]:
    root = deployment.cache.root
    existing = root
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        yield f"{existing} is no folder that can be written, so {root} cannot be made. Set kvp_cache_root."
        return
    kind = filesystem_type(existing)
    if kind in _NETWORK_FILESYSTEMS:
        yield f"{root} lies on {kind}, where a rename is not atomic. Set kvp_cache_root to a local disk."
    usage = shutil.disk_usage(existing)
    held, _ = held_bytes(deployment.cache)
    budget, floor = deployment.cache.budget_gb * 1e9, deployment.cache.min_free_gb * 1e9
    if usage.free + held < budget + floor:
        yield (
            f"{root} has {(usage.free + held) / 1e9:.1f} GB for a budget of {budget / 1e9:.1f} GB and "
            f"{floor / 1e9:.1f} GB that must stay free. Lower kvp_cache_budget_gb or use a larger disk."
        )


def _ports_of_strangers(deployment: Deployment, manager: ServiceManager) -> Iterable[str]:
    ports = (
        (deployment.cache.port, CACHE_SERVICE, "kvp_cache_port"),
        (deployment.cache.http_port, CACHE_SERVICE, "kvp_cache_http_port"),
        (deployment.engine.port, ENGINE_SERVICE, "vllm_engine_port"),
    )
    for port, service, variable in ports:
        if port_is_taken(port) and not _is_ours(port, manager.process(service), deployment, manager):
            yield f"Port {port} is taken by a program that is not {service}. Stop that program or change {variable}."


def _is_ours(port: int, running: Process | None, deployment: Deployment, manager: ServiceManager) -> bool:
    pid = listener(port)
    if running is None:
        # A killed supervisord leaves its programs behind; the deployment ends them before it starts new ones.
        return pid is not None and pid in {orphan.pid for orphan in manager.orphans()}
    if deployment.engine.launch_mode == "docker":
        return True  # the listener is a child of Docker's daemon, not of the service
    return pid is not None and descends_from(pid, running.pid)


def filesystem_type(path: str) -> str:
    """Type of the filesystem that holds a path, from /proc/self/mountinfo; empty when it cannot be told."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            columns = line.split()
            if columns[2] == wanted:
                found = columns[columns.index("-") + 1]
    return found
