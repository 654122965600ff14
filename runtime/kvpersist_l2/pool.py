"""Threads for reads and writes. Reads go first: a user waits for them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Callable

# So many reads in a row may pass a waiting write: its memory is locked for a limited time.
_READS_IN_A_ROW = 16

Job = Callable[[], None]


class Pool:
    """A fixed number of threads.

    Args:
        threads: how many.
        on_error: called with what a job raised; jobs are expected to handle their own errors.
    """

    def __init__(self, threads: int, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._reads_in_a_row = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvpersist-l2-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, job: Job) -> bool:
        """Queues a read; False once the pool is closing."""
        return self._add(self._reads, job)

    def write(self, job: Job) -> bool:
        """Queues a write; False once the pool is closing."""
        return self._add(self._writes, job)

    def queued(self) -> tuple[int, int]:
        """Reads and writes that wait for a thread."""
        with self._changed:
            return len(self._reads), len(self._writes)

    def is_alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self, timeout_s: float) -> int:
        """Takes no more jobs, lets queued ones finish for some time, drops the rest, and waits for those that run.

        Args:
            timeout_s: seconds to wait before queued jobs are dropped. Jobs that run are waited for in any case.

        Returns:
            How many jobs were dropped.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._reads or self._writes), timeout_s)
            dropped = len(self._reads) + len(self._writes)
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        return dropped

    def _add(self, queue: deque[Job], job: Job) -> bool:
        with self._changed:
            if self._is_closing:
                return False
            queue.append(job)
            self._changed.notify()
        return True

    def _next(self) -> Job | None:
        with self._changed:
            while not (self._reads or self._writes):
                if self._is_closing:
                    return None
                self._changed.wait()
            if self._writes and (not self._reads or self._reads_in_a_row >= _READS_IN_A_ROW):
                self._reads_in_a_row = 0
                job = self._writes.popleft()
            else:
                self._reads_in_a_row += 1
                job = self._reads.popleft()
            if self._is_closing:
                self._changed.notify_all()
            return job

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - a thread that died would be missed until the next restart
                self._on_error(error)
