"""Which way is faster from this disk: through the page cache, whose readahead asks early, or past it.

No rule holds: on virtual disks direct reads reached from half to twice the rate of reads through the page cache, and
one disk changed sides within an hour. So cold reads are timed as they happen and the faster way is taken; now and then
the other one is tried. What was learnt outlives restarts, since cold reads come first after one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

from kvpersist.core.layout import READ_RATES_FILE
from kvpersist.host.files import write_atomic

DIRECT, BUFFERED = WAYS = ("direct", "buffered")
# A trial takes so many bytes and objects, to be longer than the start and the end of what runs at the same time.
_TRIAL_BYTES = 128 << 20
_TRIAL_OBJECTS = 8
# One trial in so many goes the slower way: at half the rate that costs 3 % of the time.
_TRIALS_BEFORE_SLOWER = 32


class _Trial:
    """Cold reads of one way, and the time in which at least one of them ran."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.begun = self.begun_bytes = self.read_bytes = self.running = 0
        self.busy_s = self.since = 0.0

    def is_full(self) -> bool:
        return self.begun_bytes >= _TRIAL_BYTES and self.begun >= _TRIAL_OBJECTS


class _SizeClass:
    """What is known about objects of similar size: bytes per second of each way."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.rates = rates
        self._tried = set(rates)
        self._trials = 0
        self.trial = self._next()

    def trial_for(self, length: int) -> _Trial:
        if self.trial.is_full():
            self.trial = self._next()
        self.trial.begun += 1
        self.trial.begun_bytes += length
        return self.trial

    def learn(self, trial: _Trial) -> None:
        if trial.busy_s > 0:
            rate = trial.read_bytes / trial.busy_s
            self.rates[trial.way] = (self.rates.get(trial.way, rate) + rate) / 2

    def _next(self) -> _Trial:
        self._trials += 1
        untried = [way for way in WAYS if way not in self._tried]
        if untried:
            self._tried.add(untried[0])
            return _Trial(untried[0])
        slower, faster = sorted(WAYS, key=lambda way: self.rates.get(way, 0.0))
        return _Trial(faster if self._trials % _TRIALS_BEFORE_SLOWER else slower)


class ReadRates:
    """Rates of cold reads by size of object and way.

    Args:
        root: the cache root, where they are kept.
        clock: seconds that only go forward.
    """

    def __init__(self, root: str, clock: Callable[[], float]) -> None:
        self._path = os.path.join(root, READ_RATES_FILE)
        self._clock = clock
        self._lock = threading.Lock()
        self._classes = {bits: _SizeClass(rates) for bits, rates in _read(self._path).items()}
        self._is_saved = True

    @contextmanager
    def cold_read(self, length: int) -> Iterator[str]:
        """Times a cold read of ``length`` bytes and says which way it should go. A read that raises counts nothing."""
        bits = length.bit_length()
        with self._lock:
            size_class = self._classes.get(bits)
            if size_class is None:
                size_class = self._classes[bits] = _SizeClass({})
            trial = size_class.trial_for(length)
            if not trial.running:
                trial.since = self._clock()
            trial.running += 1
        read = 0
        try:
            yield trial.way
            read = length
        finally:
            with self._lock:
                trial.read_bytes += read
                trial.running -= 1
                if not trial.running:
                    trial.busy_s += self._clock() - trial.since
                    if trial.is_full():
                        size_class.learn(trial)
                        self._is_saved = False

    def values(self) -> dict[str, dict[str, float]]:
        """Bytes per second of each way, by the size in bytes that objects of a class stay below."""
        with self._lock:
            classes = sorted(self._classes.items())
            return {str(1 << bits): {way: round(rate) for way, rate in kind.rates.items()} for bits, kind in classes}

    def save(self) -> None:
        """Writes the rates to the cache root, if they changed.

        Raises:
            UsageError: when the file cannot be written.
        """
        with self._lock:
            if self._is_saved:
                return
            self._is_saved = True
        write_atomic(self._path, json.dumps(self.values()) + "\n")


def _read(path: str) -> dict[int, dict[str, float]]:
    """Rates of an earlier run; what cannot be understood is learnt anew."""
    try:
        classes = json.loads(Path(path).read_text(encoding="utf-8"))
        return {
            int(below).bit_length() - 1: {way: float(rates[way]) for way in WAYS if rates.get(way, 0) > 0}
            for below, rates in classes.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
