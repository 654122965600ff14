"""Threads for reads and writes. Reads go first: a user waits for them.

More threads than CPUs are needed to keep a disk busy, but threads that only copy memory get in each other's way: they
take turns at Python's interpreter lock and push each other's data out of the CPU's cache. So of each kind as many jobs
run as there are CPUs, and one that waits for the disk says so and lets another go on meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Callable

# So many reads in a row may pass a waiting write: its memory is locked for a limited time.
_READS_IN_A_ROW = 16

Job = Callable[[], None]


class Lane:
    """Jobs of one kind. As a context it marks the time in which the calling job waits for the disk.

    Args:
        pool: the pool whose threads run them.
        at_once: how many may run and not wait.
    """

    def __init__(self, pool: Pool, at_once: int) -> None:
        self._pool = pool
        self._at_once = at_once
        self.jobs: deque[Job] = deque()
        self.running = 0

    def may_start(self) -> bool:
        """Whether a job is there that may run now; for the pool, under its lock."""
        return bool(self.jobs) and self.running < self._at_once

    def __enter__(self) -> None:
        self._pool.change_running(self, -1)

    def __exit__(self, *_: object) -> None:
        # It goes on at once, were there even too many by now: its data is in the CPU's cache.
        self._pool.change_running(self, 1)


class Pool:
    """A fixed number of threads.

    Args:
        threads: how many.
        on_error: called with what a job raised; jobs are expected to handle their own errors.

    Attributes:
        reads, writes: for jobs to mark where they wait for the disk.
    """

    def __init__(self, threads: int, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        cpus = len(os.sched_getaffinity(0))
        self.reads, self.writes = Lane(self, cpus), Lane(self, cpus)
        self._reads_in_a_row = 0
        self._lock = threading.Lock()
        self._startable = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvpersist-l2-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, jobs: Sequence[Job]) -> bool:
        """Queues reads; False, and none of them, once the pool is closing."""
        return self._add(self.reads, jobs)

    def write(self, jobs: Sequence[Job]) -> bool:
        """Queues writes; False, and none of them, once the pool is closing."""
        return self._add(self.writes, jobs)

    def queued(self) -> tuple[int, int]:
        """Reads and writes that wait for a thread."""
        with self._lock:
            return len(self.reads.jobs), len(self.writes.jobs)

    def is_alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def change_running(self, lane: Lane, by: int) -> None:
        """Counts a job of a lane that runs, or no longer does."""
        with self._lock:
            lane.running += by
            self._wake()

    def close(self, timeout_s: float) -> int:
        """Takes no more jobs, lets queued ones finish for some time, drops the rest, and waits for those that run.

        Args:
            timeout_s: seconds to wait before queued jobs are dropped. Jobs that run are waited for in any case.

        Returns:
            How many jobs were dropped.
        """
        with self._lock:
            self._is_closing = True
            self._drained.wait_for(lambda: not (self.reads.jobs or self.writes.jobs), timeout_s)
            dropped = len(self.reads.jobs) + len(self.writes.jobs)
            self.reads.jobs.clear()
            self.writes.jobs.clear()
            self._startable.notify_all()
        for thread in self._threads:
            thread.join()
        return dropped

    def _add(self, lane: Lane, jobs: Sequence[Job]) -> bool:
        with self._lock:
            if self._is_closing:
                return False
            lane.jobs.extend(jobs)
            self._wake()
        return True

    def _wake(self) -> None:
        # One thread at a time: it wakes the next when there is more to start.
        if self.reads.may_start() or self.writes.may_start():
            self._startable.notify()

    def _choose(self) -> Lane | None:
        """The lane whose turn it is, None where nothing may start."""
        if self.writes.may_start() and (not self.reads.jobs or self._reads_in_a_row >= _READS_IN_A_ROW):
            self._reads_in_a_row = 0
            return self.writes
        if self.reads.may_start():
            self._reads_in_a_row += 1
            return self.reads
        return None

    def _next(self, done: Lane | None) -> tuple[Lane, Job] | None:
        with self._lock:
            if done is not None:
                done.running -= 1
            while (lane := self._choose()) is None:
                if self._is_closing and not (self.reads.jobs or self.writes.jobs):
                    return None
                self._startable.wait()
            lane.running += 1
            job = lane.jobs.popleft()
            if self._is_closing and not (self.reads.jobs or self.writes.jobs):
                self._drained.notify_all()
                self._startable.notify_all()
            self._wake()
            return lane, job

    def _work(self) -> None:
        lane: Lane | None = None
        while (work := self._next(lane)) is not None:
            lane, job = work
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - a thread that died would be missed until the next restart
                self._on_error(error)
