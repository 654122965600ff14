"""How the command shows that it hashes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from ..host import hashing
from ..host.progress import ProgressLines


@contextmanager
def hashing_progress(console: Console) -> Iterator[hashing.Progress]:
    """What to give to functions that hash. Nothing is shown when nothing must be read."""
    if not console.is_terminal:
        yield ProgressLines(console.print)
        return
    bar = Progress(
        "hashing", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console
    )
    task = bar.add_task("hashing", start=False, total=None)

    def show(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
            bar.start_task(task)
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
