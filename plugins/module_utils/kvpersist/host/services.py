"""Services: one interface over systemd and, where it is not PID 1, supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..core.deployment import Deployment
from ..core.errors import KvpError
from .processes import Process, command_line, environment, process, processes

CACHE_SERVICE = "kvp-lmcache-server"
ENGINE_SERVICE = "kvp-vllm-engine"

_COMMAND_TIMEOUT_S = 180.0
_ORPHAN_S = 20.0


class ServiceError(KvpError):
    """The service manager did not do what it was asked."""


class ServiceManager(ABC):
    """What a deployment needs of a service manager."""

    @abstractmethod
    def reload(self) -> None:
        """Makes new and changed definitions known, starting the manager itself where it is ours. Restarts nothing."""

    @abstractmethod
    def pid(self, name: str) -> int | None:
        """Pid of a service's main process; None while it does not run."""

    @abstractmethod
    def start(self, name: str) -> None:
        """Starts a service; returns when its process exists."""

    @abstractmethod
    def stop(self, name: str) -> None:
        """Stops a service and waits for its end; a stopped one stays stopped."""

    def shutdown(self) -> None:
        """Ends the manager itself where it is ours; the system's goes on."""
        return

    def orphans(self) -> list[Process]:
        """Programs of this deployment that run outside the manager's care."""
        return []

    def process(self, name: str) -> Process | None:
        """The service's main process."""
        pid = self.pid(name)
        return process(pid) if pid else None

    def restart(self, name: str) -> None:
        """Stops and starts a service."""
        self.stop(name)
        self.start(name)

    def kill(self, name: str) -> None:
        """SIGKILL to a service's main process; the manager may start it again by its own policy.

        Raises:
            ServiceError: when it does not run or does not die.
        """
        running = self.process(name)
        if running is None:
            raise ServiceError(f"killing {name}", "it does not run", "Start it first.")
        os.kill(running.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while process(running.pid) == running:
            if time.monotonic() > deadline:
                raise ServiceError(f"killing {name}", f"process {running.pid} does not die", "Look at the host's log.")
            time.sleep(0.05)


class Supervisor(ServiceManager):
    """supervisord of one deployment, run by the deploying user.

    Args:
        home: folder of kvpersist's programs; its virtual environment has supervisor.
        state_dir: folder with ``supervisor/supervisord.conf``.
        config_dir: folder of the deployment's files, by which its programs are known.
    """

    def __init__(self, home: str, state_dir: str, config_dir: str) -> None:
        self._config_dir = config_dir
        self._bin = f"{home}/venv/bin"
        self._folder = f"{state_dir}/supervisor"

    @property
    def running(self) -> bool:
        """Whether supervisord answers."""
        return self._ctl("pid").returncode == 0

    def reload(self) -> None:
        if not self.running:
            self._end_orphans()
            _run([f"{self._bin}/supervisord", "-c", self._config], "starting supervisord")
            self._wait_until_running()
            return
        self._checked("reread")

    def pid(self, name: str) -> int | None:
        text = self._ctl("pid", name).stdout.strip()
        return int(text) if text.isdigit() and int(text) > 0 else None

    def start(self, name: str) -> None:
        if self.pid(name) is not None:
            return
        # Only removing and adding a program takes up a changed definition; adding starts it (autostart=true).
        self._ctl("stop", name)
        self._ctl("remove", name)
        self._checked("add", name)
        deadline = time.monotonic() + 10
        while self.pid(name) is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def stop(self, name: str) -> None:
        if "no such process" in self._ctl("stop", name).stdout.lower():
            return
        if self.pid(name) is not None:
            raise ServiceError(f"stopping {name}", "it still runs", f"See {self._folder}/supervisord.log.")

    def shutdown(self) -> None:
        """Stops every service and supervisord itself."""
        pid = self._ctl("pid").stdout.strip()
        if not pid.isdigit():
            self._end_orphans()
            return
        self._checked("shutdown")
        deadline = time.monotonic() + _COMMAND_TIMEOUT_S
        while process(int(pid)) is not None and time.monotonic() < deadline:
            time.sleep(0.2)

    def orphans(self) -> list[Process]:
        """Programs of this deployment that a supervisord left behind when it was killed."""
        if self.running:
            return []
        mine = [pid for pid in processes() if environment(pid).get("KVP_CONFIG_DIR") == self._config_dir]
        found = [process(pid) for pid in mine if not _is_command(pid)]
        return [orphan for orphan in found if orphan is not None]

    def _end_orphans(self) -> None:
        """They hold the ports that the services are about to need."""
        orphans = self.orphans()
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for orphan in orphans:
                if process(orphan.pid) == orphan:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(orphan.pid, sent)
            deadline = time.monotonic() + _ORPHAN_S
            while any(process(orphan.pid) == orphan for orphan in orphans) and time.monotonic() < deadline:
                time.sleep(0.1)

    @property
    def _config(self) -> str:
        return f"{self._folder}/supervisord.conf"

    def _wait_until_running(self) -> None:
        deadline = time.monotonic() + 30
        while not self.running:
            if time.monotonic() > deadline:
                raise ServiceError("starting supervisord", "it does not answer", f"See {self._folder}/supervisord.log.")
            time.sleep(0.2)

    def _ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [f"{self._bin}/supervisorctl", "-c", self._config, *arguments]
        if not os.path.exists(argv[0]):
            # Nothing is installed yet, so nothing runs; the shell's status for a command that is not there.
            return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]} is missing")
        return _call(argv, f"supervisorctl {arguments[0]}")

    def _checked(self, *arguments: str) -> None:
        _run([f"{self._bin}/supervisorctl", "-c", self._config, *arguments], f"supervisorctl {' '.join(arguments)}")


class Systemd(ServiceManager):
    """The system's systemd."""

    def reload(self) -> None:
        _run(["systemctl", "daemon-reload"], "reloading systemd")

    def pid(self, name: str) -> int | None:
        text = _call(["systemctl", "show", "--property=MainPID", "--value", name], "asking systemd").stdout.strip()
        return int(text) if text.isdigit() and int(text) > 0 else None

    def start(self, name: str) -> None:
        _run(["systemctl", "start", name], f"starting {name}")

    def stop(self, name: str) -> None:
        _run(["systemctl", "stop", name], f"stopping {name}")


def _is_command(pid: int) -> bool:
    """Whether a process is the ``kvpersist`` command that somebody runs, or this very process."""
    return pid == os.getpid() or any(word.endswith("/bin/kvpersist") for word in command_line(pid) or ())


def resolved_manager(configured: str) -> str:
    """``systemd`` or ``supervisor``: the configured one, ``auto`` by what PID 1 is (sd_booted(3))."""
    if configured != "auto":
        return configured
    return "systemd" if os.path.isdir("/run/systemd/system") else "supervisor"


def service_manager(deployment: Deployment) -> ServiceManager:
    """The manager of this deployment's services."""
    if resolved_manager(deployment.service_manager) == "systemd":
        return Systemd()
    return Supervisor(deployment.home, deployment.state_dir, deployment.config_dir)


def _call(argv: Sequence[str], doing: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # fixed programs, arguments are names of our own services
            argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ServiceError(doing, f"{argv[0]} is missing", "Run the playbook to install it.") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(doing, f"no end after {_COMMAND_TIMEOUT_S:.0f} s", "See the service's log.") from None


def _run(argv: Sequence[str], doing: str) -> None:
    result = _call(argv, doing)
    if result.returncode != 0:
        cause = " ".join((result.stderr or result.stdout).split()) or f"exit status {result.returncode}"
        raise ServiceError(doing, cause, "See the service manager's log.")
