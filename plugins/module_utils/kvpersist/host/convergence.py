"""Does a service already run what the settings ask for?

The comparison is with the process, not with what was once written. A deployment that was interrupted half-way, or a
service that somebody started by hand, is brought in line by the next run all the same; and a setting that a service
does not use does not restart it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import commands
from ..core.deployment import Deployment
from ..core.errors import KvpError, UsageError
from .deployment import load_identity
from .gate import registered_models
from .health import cache_endpoint, engine_endpoint, is_healthy, wait_healthy
from .http import get_json
from .identity import namespace_of
from .l2_tier import cache_server
from .processes import Process, command_line
from .processes import environment as started_with
from .services import CACHE_SERVICE, ENGINE_SERVICE, ServiceManager, service_manager

# A launcher hashes what changed before it becomes the program; the digests of an unchanged model are remembered.
_LAUNCHER_S = 15.0


def wanted_command(deployment: Deployment, service: str, namespace: str | None) -> tuple[list[str], dict[str, str]]:
    """Arguments and own environment variables that a service should run with.

    Args:
        namespace: the engine's; None takes that of the saved identity. Unused where the cache is not attached.
    """
    if service == CACHE_SERVICE:
        cache = cache_server(deployment)
        return commands.cache_argv(cache), commands.cache_environment(cache)
    if not deployment.engine.kv_persist:
        namespace = None
    elif namespace is None:
        namespace = namespace_of(deployment, load_identity(deployment.config_dir))
    return commands.engine_argv(deployment.engine, namespace), commands.engine_environment(deployment.engine)


def deviations(running: Process, argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What a running process does not have as wanted, in words; empty when it is in line."""
    found = command_line(running.pid)
    if found is None:
        return ["its arguments cannot be read"]
    words = []
    if found != list(argv):
        gone = [word for word in found if word not in argv]
        new = [word for word in argv if word not in found]
        if gone or new:
            words.append(f"arguments change from {' '.join(gone) or 'nothing'} to {' '.join(new) or 'nothing'}")
        else:
            words.append("arguments change in their order or number")
    actual = started_with(running.pid)
    words.extend(
        f"{name} changes from {actual.get(name)!r} to {value!r}"
        for name, value in environment.items()
        if actual.get(name) != value
    )
    return words


@dataclass(frozen=True)
class Action:
    """What was done to a service, or in check mode would be, and why."""

    action: str
    reasons: tuple[str, ...] = ()

    def as_result(self) -> dict[str, Any]:
        """The keys that the module returns."""
        changed = self.action != "none"
        diff = {"before": "", "after": "".join(f"{reason}\n" for reason in self.reasons)} if changed else {}
        return {"changed": changed, "action": self.action, "reasons": list(self.reasons), "diff": diff}


def converge_started(
    deployment: Deployment, name: str, namespace: str | None, restart: bool, timeout_s: float, check_mode: bool
) -> Action:
    """Makes a service run what the settings ask for, and waits until it is healthy.

    Args:
        name: ``cache`` or ``engine``.
        namespace: as for :func:`wanted_command`.
        restart: restart it in any case.

    Raises:
        UsageError: for a name that cannot be started.
        KvpError: when the service does not become healthy.
    """
    endpoints = {"cache": cache_endpoint, "engine": engine_endpoint}
    if name not in endpoints:
        raise UsageError("starting services", f"{name!r} is not one service", "Start cache and engine one by one.")
    endpoint = endpoints[name](deployment)
    manager = service_manager(deployment)
    argv, environment = wanted_command(deployment, endpoint.service, namespace)
    running = _past_its_launcher(manager, endpoint.service)
    reasons = ["it does not run"] if running is None else deviations(running, argv, environment)
    if running is not None and name == "engine" and not reasons and not _is_registered(deployment, argv):
        reasons.append("the cache server was restarted and does not know it")
    if restart and running is not None:
        reasons.append("its definition or what it depends on changed")
    action = Action("none" if not reasons else "started" if running is None else "restarted", tuple(reasons))
    if check_mode:
        return action
    if reasons:
        manager.reload()
        manager.restart(endpoint.service)
    wait_healthy(manager, endpoint, deployment.engine.launch_mode == "docker", timeout_s)
    return action


def _is_registered(deployment: Deployment, argv: Sequence[str]) -> bool:
    """Whether the cache server knows the engine; a server that does not answer says nothing about that.

    A server that was restarted has lost the registration, and LMCache's heartbeat may take minutes to renew it, or
    miss the restart (LMCache issue 4642).
    """
    engine = deployment.engine
    if not engine.kv_persist or not is_healthy(service_manager(deployment), engine_endpoint(deployment), True):
        return True  # not attached, or still loading: it registers when it is ready
    try:
        status = get_json(f"{deployment.cache.http_url}/status")
    except KvpError:
        return True
    return argv[argv.index("--model") + 1] in registered_models(status)


def _past_its_launcher(manager: ServiceManager, service: str) -> Process | None:
    """The service's process once it is the program itself: a service that has just started is its launcher first."""
    deadline = time.monotonic() + _LAUNCHER_S
    while True:
        running = manager.process(service)
        if running is None or time.monotonic() > deadline:
            return running
        if not any(word.endswith("/bin/kvpersist") for word in command_line(running.pid) or ()):
            return running
        time.sleep(0.2)


def converge_stopped(deployment: Deployment, name: str, check_mode: bool) -> Action:
    """Stops a service, or with ``all`` both, and what keeps them running where that is ours."""
    manager = service_manager(deployment)
    services = {"cache": (CACHE_SERVICE,), "engine": (ENGINE_SERVICE,)}.get(name, (ENGINE_SERVICE, CACHE_SERVICE))
    running = [service for service in services if manager.process(service) is not None]
    left_behind = manager.orphans() if name == "all" else []
    if running and not check_mode:
        for service in running:
            manager.stop(service)
    if name == "all" and not check_mode:
        manager.shutdown()
    reasons = [f"{service} runs" for service in running] + [
        f"process {orphan.pid} was left behind" for orphan in left_behind
    ]
    return Action("stopped" if reasons else "none", tuple(reasons))
