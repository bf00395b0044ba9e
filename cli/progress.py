"""Progress bars, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(doing: str = "converting", unit: str = "bytes") -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error if that is a terminal, of bytes or of another `unit`; it appears with the first.

    Before them a download may have bars of its own.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    counted: list[progress.ProgressColumn] = [progress.MofNCompleteColumn(), progress.TextColumn(unit)]
    columns = [progress.DownloadColumn(), progress.TransferSpeedColumn()] if unit == "bytes" else counted
    shown = (progress.TextColumn(doing), progress.BarColumn(), *columns, progress.TimeRemainingColumn())
    bar = progress.Progress(*shown, console=Console(stderr=True), transient=True)
    task = bar.add_task(doing)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        bar.start()  # after it, so that nothing else is shown before

    try:
        yield show
    finally:
        bar.stop()
