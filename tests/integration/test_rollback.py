"""Weights that look the same never share KV, and going back finds the earlier KV again. Runs in this order."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvpersist.core.recovery import Answer
from kvpersist.host.http import ask
from kvpersist.host.recovery import make_prompt

from .conftest import Demo

pytestmark = pytest.mark.integration

PLAYBOOK = "playbooks/rollback.yml"
RENDER = "kvp_common : Render the settings"
IDENTITY = "identity : Hash the model and derive the identity"
START = "kvp_common : Start the service, or restart it where it runs with other arguments"
TOKENS = 800  # few enough for the smallest model of the demo


@dataclass
class Twins:
    """Two folders with equal config, tokenizer, file names and sizes, and what is known of each deployment.

    Attributes:
        chunks: chunks of the question, as LMCache cuts it.
    """

    other: Path
    first: str
    second: str = ""
    cold: Answer | None = None
    chunks: int = 0


def as_json(demo: Demo, *arguments: str) -> dict[str, Any]:
    run = demo.kvpersist(*arguments, "--json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def other_weights(model: Path, folder: Path) -> Path:
    """A copy of a model whose weights differ in the lowest bit of every number."""
    shutil.copytree(model, folder)
    for path in folder.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")  # safetensors: length of the header, header, numbers
        low = slice(start, None, 2)  # bfloat16, little-endian
        content[low] = content[low].translate(bytes(value ^ 1 for value in range(256)))
        path.write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def twins(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    model = Path(as_json(demo, "config")["kvp_model_dir"])
    other = other_weights(model, tmp_path_factory.mktemp("twins") / "model")
    sizes = [{path.name: path.stat().st_size for path in folder.iterdir()} for folder in (model, other)]
    assert sizes[0] == sizes[1]
    assert (model / "config.json").read_bytes() == (other / "config.json").read_bytes()
    yield Twins(other, as_json(demo, "identity")["namespace"])
    shutil.rmtree(other, ignore_errors=True)


@pytest.fixture(scope="module")
def question(demo: Demo) -> Callable[[], Answer]:
    """Asks the engine the same question each time, one that nobody has asked before."""
    settings = as_json(demo, "config")
    url = f"http://127.0.0.1:{settings['vllm_engine_port']}"
    prompt = make_prompt(secrets.token_hex(8), TOKENS)
    return lambda: ask(url, settings["kvp_model_id"], prompt, 24, 60)


def stored_objects(demo: Demo, namespace: str) -> int:
    (entry,) = [each for each in as_json(demo, "identity", "history")["identities"] if each["namespace"] == namespace]
    return entry["stored"]["objects"]


def test_the_second_of_two_twins_never_hits(demo: Demo, twins: Twins, question: Callable[[], Answer]) -> None:
    before = stored_objects(demo, twins.first)
    twins.cold = question()
    assert twins.cold.cached_tokens == 0
    twins.chunks = twins.cold.prompt_tokens // 256
    deadline = time.monotonic() + 20
    while stored_objects(demo, twins.first) < before + twins.chunks:
        assert time.monotonic() < deadline, "the prompt was not stored"

    changes = demo.changes("--tags", "engine", "-e", f"kvp_model_dir={twins.other}")
    assert changes == [IDENTITY, f"{RENDER}: cache.env.local", f"{RENDER}: tp4.env", START]
    twins.second = as_json(demo, "identity")["namespace"]
    explanation = as_json(demo, "identity", "explain", twins.first, "running")
    assert [change["name"] for change in explanation["changes"]] == [
        "model_revision",
        "weights_sha256",
        "tokenizer_revision",
    ]
    assert (explanation["reusable"], explanation["stored"]["objects"]) == (False, before + twins.chunks)
    assert question().cached_tokens == 0
    own = question().cached_tokens
    assert own is not None
    assert own > 0  # its own KV, or the 0 above would prove nothing


def test_going_back_the_first_twin_hits_again(demo: Demo, twins: Twins, question: Callable[[], Answer]) -> None:
    # Nothing in memory may answer for the disk.
    os.kill(int(demo.supervisorctl("pid", "kvp-lmcache-server")), signal.SIGKILL)
    changes = demo.changes("-e", f"kvp_rollback_to={twins.first}", playbook=PLAYBOOK)
    assert changes == [IDENTITY, f"{RENDER}: cache.env.local", f"{RENDER}: tp4.env", START]
    again = question()
    assert again.cached_tokens is not None
    assert again.cached_tokens >= twins.chunks * 256 - 256  # the last chunk is computed when the prompt ends with it
    assert twins.cold is not None
    assert again.text == twins.cold.text


def test_a_rollback_is_predicted_and_a_second_one_changes_nothing(demo: Demo, twins: Twins) -> None:
    predicted = demo.changes("-e", f"kvp_rollback_to={twins.second}", "--check", playbook=PLAYBOOK)
    assert predicted == [IDENTITY, f"{RENDER}: cache.env.local", f"{RENDER}: tp4.env", START]
    assert demo.changes("-e", f"kvp_rollback_to={twins.first}", playbook=PLAYBOOK) == []


def test_a_rollback_that_is_not_possible_is_one_line_and_changes_nothing(demo: Demo, twins: Twins) -> None:
    before = {path: path.read_bytes() for path in demo.config.iterdir()}
    shutil.rmtree(twins.other)
    for namespace, line in (
        ("kvp-" + "0" * 32, "no deployment of this host had it"),
        (twins.second, f"reading the model folder {twins.other}: it is not a folder"),
    ):
        run = demo.playbook("-e", f"kvp_rollback_to={namespace}", playbook=PLAYBOOK)
        assert run.returncode != 0
        assert line in " ".join((run.stdout + run.stderr).split())  # Ansible folds long lines
        assert "Traceback" not in run.stdout + run.stderr
    assert {path: path.read_bytes() for path in demo.config.iterdir()} == before
    assert demo.kvpersist("gate").returncode == 0
