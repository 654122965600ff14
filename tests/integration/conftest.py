"""The demo deployment as a fixture: real LMCache, real vLLM, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Demo:
    """The deployed demo and the commands a user has on it."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "demo"

    @property
    def config(self) -> Path:
        return self.root / "etc"

    def make(self, *targets: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *targets], cwd=PROJECT, env=self._environment(), text=True, check=False)

    def playbook(self, *arguments: str, playbook: str = "site.yml") -> subprocess.CompletedProcess[str]:
        argv = [str(self.home / "controller/bin/ansible-playbook"), playbook, "-l", "demo", *arguments]
        return subprocess.run(argv, cwd=PROJECT, env=self._environment(), capture_output=True, text=True, check=False)

    def changes(self, *arguments: str, playbook: str = "site.yml") -> list[str]:
        """Runs a playbook and returns what it reports as changed, as ``task`` or ``task: item``."""
        argv = [str(self.home / "controller/bin/ansible-playbook"), playbook, "-l", "demo", *arguments]
        environment = {**self._environment(), "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"}
        run = subprocess.run(argv, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
        return sorted(_changed(json.loads(run.stdout[run.stdout.index("{") :])))

    def kvpersist(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "bin/kvpersist"), *arguments],
            env={**self._environment(), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def supervisorctl(self, *arguments: str) -> str:
        argv = [str(self.root / "venv/bin/supervisorctl"), "-c", str(self.root / "state/supervisor/supervisord.conf")]
        return subprocess.run([*argv, *arguments], capture_output=True, text=True, check=True).stdout

    def _environment(self) -> dict[str, str]:
        path = f"{self.home / 'controller/bin'}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "DEMO_HOME": str(self.home), "PATH": path, "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"}


def _changed(report: dict[str, Any]) -> list[str]:
    names = []
    for play in report["plays"]:
        for task in play["tasks"]:
            for result in task["hosts"].values():
                for item in result.get("results", [result]):
                    if item.get("changed"):
                        label = f": {item['item']}" if "item" in item else ""
                        names.append(f"{task['task']['name']}{label}")
    return names


@pytest.fixture(scope="session")
def demo() -> Demo:
    """`make demo`, run once; what the tests change in it they change back."""
    deployed = Demo(Path(os.environ.get("DEMO_HOME", PROJECT / ".kvp")))
    run = deployed.make("demo")
    assert run.returncode == 0
    yield deployed
    assert deployed.make("demo-stop").returncode == 0
