from __future__ import annotations

import threading

from kvpersist_l2.pool import Pool


def test_reads_go_first_and_writes_do_not_starve() -> None:
    pool = Pool(1, lambda error: None)
    gate, order = threading.Event(), []
    pool.read(gate.wait)
    for number in range(3):
        pool.write(lambda number=number: order.append(f"write {number}"))  # type: ignore[misc]
    for number in range(40):
        pool.read(lambda number=number: order.append(f"read {number}"))  # type: ignore[misc]
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
    pool.read(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    done = threading.Event()
    pool.read(done.set)
    assert done.wait(10)
    assert pool.is_alive()
    pool.close(1)
    assert isinstance(errors[0], ZeroDivisionError)
    assert not pool.read(done.set)


def test_closing_drops_what_waits_too_long_and_waits_for_what_runs() -> None:
    pool = Pool(1, lambda error: None)
    started, gate, finished = threading.Event(), threading.Event(), []

    def slow() -> None:
        started.set()
        gate.wait()
        finished.append(True)

    pool.write(slow)
    started.wait()
    pool.write(lambda: finished.append(False))
    threading.Timer(0.2, gate.set).start()
    assert pool.close(0.05) == 1
    assert finished == [True]
