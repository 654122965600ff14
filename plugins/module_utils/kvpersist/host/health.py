"""Waiting for a service until the process that answers its port is the one that was started."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ..core.deployment import Deployment
from ..core.errors import KvpError
from .http import answers
from .processes import Process, connects, descends_from, listener
from .services import CACHE_SERVICE, ENGINE_SERVICE, ServiceManager

_POLL_S = 0.5
# A service manager restarts a crashed program within seconds. Without a process for this long it has given up, and
# after this many processes it will not succeed either.
_GIVEN_UP_S = 25.0
_TOO_MANY_PROCESSES = 4
_LOG_LINES = 3


class NotHealthyError(KvpError):
    """A service did not become healthy."""


@dataclass(frozen=True)
class Endpoint:
    """How a service shows that it works: a URL that answers with success, and its port."""

    service: str
    url: str
    port: int
    log: str


def cache_endpoint(deployment: Deployment) -> Endpoint:
    """The cache server's."""
    url = f"{deployment.cache.http_url}/healthcheck"
    return Endpoint(CACHE_SERVICE, url, deployment.cache.http_port, f"{deployment.log_dir}/lmcache-server.log")


def engine_endpoint(deployment: Deployment) -> Endpoint:
    """The engine's."""
    url = f"{deployment.engine.url}/health"
    return Endpoint(ENGINE_SERVICE, url, deployment.engine.port, f"{deployment.log_dir}/vllm-engine.log")


def is_healthy(manager: ServiceManager, endpoint: Endpoint, containerised: bool) -> bool:
    """Whether a service answers, and it is this service that answers.

    A forgotten process on the same port would answer for a new one; so the listener must be the service's own
    process. Inside a container the listener is not a child of the service, and only the answer counts.
    """
    running = manager.process(endpoint.service)
    if running is None or not answers(endpoint.url):
        return False
    if containerised:
        return True
    pid = listener(endpoint.port)
    return pid is not None and descends_from(pid, running.pid)


def wait_healthy(manager: ServiceManager, endpoint: Endpoint, containerised: bool, timeout_s: float) -> Process:
    """Waits until a service is healthy and returns its process.

    Raises:
        NotHealthyError: after ``timeout_s`` seconds, or as soon as the service keeps crashing; with the end of the log.
    """
    deadline = time.monotonic() + timeout_s
    last_seen = time.monotonic()
    seen: set[Process] = set()
    while True:
        running = manager.process(endpoint.service)
        if running is not None:
            last_seen = time.monotonic()
            seen.add(running)
            if is_healthy(manager, endpoint, containerised):
                return running
        if time.monotonic() - last_seen > _GIVEN_UP_S or len(seen) >= _TOO_MANY_PROCESSES:
            raise _not_healthy(endpoint, "it does not stay up")
        if time.monotonic() > deadline:
            raise _not_healthy(endpoint, f"no healthy answer from {endpoint.url} after {timeout_s:.0f} s")
        time.sleep(_POLL_S)


def cache_answers(deployment: Deployment) -> bool:
    """Whether the cache server is healthy and takes requests."""
    cache = deployment.cache
    return answers(f"{cache.http_url}/healthcheck") and connects(cache.host, cache.port)


def tail(path: str, lines: int = _LOG_LINES, limit: int = 65536) -> str:
    """Last lines of a log, at most ``limit`` bytes of it."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return " | ".join(file.read().decode("utf-8", "replace").strip().splitlines()[-lines:])
    except OSError:
        return ""


def _not_healthy(endpoint: Endpoint, cause: str) -> NotHealthyError:
    end = tail(endpoint.log)
    return NotHealthyError(
        f"waiting for {endpoint.service}", f"{cause}; its log ends: {end}" if end else cause, f"Read {endpoint.log}."
    )
