from __future__ import annotations

import threading

import pytest
from kvpersist_l2.pool import Pool


def test_reads_go_first_and_writes_do_not_starve() -> None:
    pool = Pool(1, lambda error: None)
    gate, order = threading.Event(), []
    pool.read([gate.wait])  # type: ignore[list-item]
    pool.write([lambda number=number: order.append(f"write {number}") for number in range(3)])  # type: ignore[misc]
    pool.read([lambda number=number: order.append(f"read {number}") for number in range(40)])  # type: ignore[misc]
    assert pool.queued()[1] == 3
    gate.set()
    assert pool.close(10) == 0
    assert order[0] == "read 0"
    assert 10 < order.index("write 0") < 20
    assert order.index("write 1") < 40
    assert [entry for entry in order if entry.startswith("read")] == [f"read {number}" for number in range(40)]


def test_a_job_that_fails_leaves_its_thread_running() -> None:
    errors: list[BaseException] = []
    pool = Pool(1, errors.append)
    done = threading.Event()
    pool.read([lambda: 1 / 0, done.set])  # type: ignore[arg-type, return-value, list-item]
    assert done.wait(10)
    assert pool.is_alive()
    pool.close(1)
    assert isinstance(errors[0], ZeroDivisionError)
    assert not pool.read([done.set])


def test_closing_drops_what_waits_too_long_and_waits_for_what_runs() -> None:
    pool = Pool(1, lambda error: None)
    started, gate, finished = threading.Event(), threading.Event(), []

    def slow() -> None:
        started.set()
        gate.wait()
        finished.append(True)

    pool.write([slow])
    started.wait()
    pool.write([lambda: finished.append(False)])
    threading.Timer(0.2, gate.set).start()
    assert pool.close(0.05) == 1
    assert finished == [True]


@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_as_many_jobs_as_cpus_compute_and_all_threads_wait_for_the_disk(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    pool = Pool(6, lambda error: None)
    lane = getattr(pool, kind)
    add = pool.read if kind == "reads" else pool.write
    computing, most = [0], [0]
    lock, all_wait, two_compute = threading.Lock(), threading.Barrier(6), threading.Barrier(2)

    def job() -> None:
        with lock:
            computing[0] += 1
            most[0] = max(most[0], computing[0])
        two_compute.wait(10)
        with lock:
            computing[0] -= 1
        with lane:
            all_wait.wait(10)  # breaks unless all six threads come here

    add([job] * 6)
    assert pool.close(10) == 0
    assert most[0] == 2
    assert not all_wait.broken
    assert not two_compute.broken
    assert lane.running == 0


def test_reads_that_compute_leave_no_room_for_writes_but_reads_that_wait_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    pool = Pool(3, lambda error: None)
    reading, gate, written = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with pool.reads:
            reading.set()
            gate.wait(10)

    pool.read([read])
    assert reading.wait(10)
    pool.write([written.set])
    assert written.wait(10)
    gate.set()
    assert pool.close(10) == 0
