"""host.processes: what /proc says about real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvp_kit import Spawn, free_ports, wait_until
from kvpersist.host import processes

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])  # noqa: S104  # a moment, to be found
def test_listener_is_the_process_that_holds_the_socket(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such address")
    with server:
        port = server.getsockname()[1]
        assert processes.listener(port) == os.getpid()
        assert processes.port_is_taken(port)
    assert processes.listener(port) is None
    assert not processes.port_is_taken(port)


def test_a_connected_socket_and_a_bound_one_are_no_listeners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert processes.listener(client.getsockname()[1]) is None
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not processes.port_is_taken(bound.getsockname()[1])


def test_listener_of_another_process_is_found(spawn: Spawn) -> None:
    (port,) = free_ports(1)
    child = spawn(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)], port, stderr=subprocess.DEVNULL
    )
    assert processes.listener(port) == child.pid


@pytest.mark.parametrize(
    "arguments",
    [
        ["plain"],
        ["with blank", "", "日本", "a=b"],
        ["last is empty", ""],
        ["--json", '{"a": [1, "x"]}', "", ""],
    ],
)
def test_command_line_is_exactly_what_the_process_was_started_with(spawn: Spawn, arguments: list[str]) -> None:
    argv = [*SLEEP, *arguments]
    assert processes.command_line(spawn(argv).pid) == argv


def test_there_is_no_command_line_of_no_process() -> None:
    child = subprocess.Popen(["/bin/true"])
    wait_until(lambda: processes.process(child.pid) is None)
    assert Path(f"/proc/{child.pid}").exists(), "it must be a zombie for this test"
    assert processes.command_line(child.pid) is None
    child.wait()
    assert processes.command_line(child.pid) is None


def test_a_process_is_told_from_a_later_one_by_its_start(spawn: Spawn) -> None:
    first = spawn(SLEEP)
    time.sleep(0.05)
    second = spawn(SLEEP)
    one, two = processes.process(first.pid), processes.process(second.pid)
    assert one is not None
    assert two is not None
    assert one == processes.process(first.pid)
    assert one.start_ticks < two.start_ticks
    assert processes.Process(one.pid, two.start_ticks) != one


def test_a_dead_process_is_none_also_while_nobody_has_waited_for_it(spawn: Spawn) -> None:
    child = spawn(SLEEP)
    child.kill()
    wait_until(lambda: processes.process(child.pid) is None)
    child.wait()
    assert processes.process(child.pid) is None


def test_a_name_with_parentheses_and_blanks_does_not_confuse(spawn: Spawn, tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to(os.path.realpath("/bin/sleep"))
    child = spawn([str(program), "60"])
    found = processes.process(child.pid)
    assert found is not None
    ordinary = processes.process(os.getpid())
    assert ordinary is not None
    assert found.start_ticks > ordinary.start_ticks
    assert processes.descends_from(child.pid, os.getpid())


def test_descent_is_followed_over_generations(spawn: Spawn) -> None:
    shell = spawn(["/bin/sh", "-c", "sleep 60 & wait"])
    children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
    grandchild = int(wait_until(lambda: children.read_text(encoding="utf-8")))
    assert processes.descends_from(grandchild, shell.pid)
    assert processes.descends_from(grandchild, os.getpid())
    assert processes.descends_from(shell.pid, shell.pid)
    assert not processes.descends_from(shell.pid, grandchild)
    assert not processes.descends_from(os.getpid(), shell.pid)
    os.kill(grandchild, 9)


def test_nothing_descends_from_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    assert not processes.descends_from(child.pid, os.getpid())


def test_connects_tells_an_open_port_from_a_closed_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert processes.connects("127.0.0.1", port)
    assert not processes.connects("127.0.0.1", port)
    assert not processes.connects("no-such-host.invalid", port)


def test_storage_read_bytes_grow_when_a_file_comes_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(os.urandom(4 * 1024 * 1024))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    before = processes.storage_read_bytes(os.getpid())
    assert before is not None
    path.read_bytes()
    after = processes.storage_read_bytes(os.getpid())
    assert after is not None
    if processes.block_device(str(tmp_path)) is None and after == before:
        pytest.skip("the temporary folder lies on no block device")
    assert after - before >= 4 * 1024 * 1024


def test_counters_that_are_not_there_are_none() -> None:
    assert processes.storage_read_bytes(2**22 + 1) is None
    assert processes.device_read_bytes("no-such-device") is None
    assert processes.device_read_bytes("../../../etc/passwd") is None
    assert processes.block_device("/proc") is None
    assert processes.block_device("/no/such/folder") is None


def test_counters_of_a_device_are_bytes_that_only_grow() -> None:
    device = next(
        (name for name in sorted(os.listdir("/sys/class/block")) if not name.startswith(("loop", "ram"))), None
    )
    if device is None:
        pytest.skip("this machine has no block device")
    first = processes.device_read_bytes(device)
    assert first is not None
    assert first % 512 == 0
    assert processes.device_read_bytes(device) >= first


def test_a_path_is_seen_as_a_process_of_the_same_root_sees_it(spawn: Spawn) -> None:
    child = spawn(SLEEP)
    assert processes.visible_path(child.pid, "/models/x") == "/models/x"
    child.kill()
    child.wait()
    assert processes.visible_path(child.pid, "/models/x") is None
