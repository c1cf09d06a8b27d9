"""Progress on stderr: a line that changes on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

_LINES_AT_ONCE = 20
_SECONDS_BETWEEN = 2.0


@dataclass(slots=True)
class Lines:
    """Progress where nobody looks at a terminal: the first lines all, later ones no closer than two seconds."""

    console: Console
    count: int = 0
    last_s: float = field(default_factory=time.monotonic)

    def show(self, message: str) -> None:
        """Write the message, or leave it out when too many came."""
        now = time.monotonic()
        if self.count < _LINES_AT_ONCE or now - self.last_s >= _SECONDS_BETWEEN:
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)
            self.count, self.last_s = self.count + 1, now


class Progress:
    """Where a command tells what it does; usable as the ``progress`` callback of a search."""

    def __init__(self, console: Console) -> None:
        """Choose by what the console is."""
        self._console = console
        self._lines = Lines(console=console)
        self._status = console.status("starting") if console.is_terminal else None

    def __call__(self, message: str) -> None:
        """Say what happens now."""
        if self._status is None:
            self._lines.show(message)
        else:
            self._status.update(escape(message))

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show it while the block runs; the changing line is gone afterwards, also after an error."""
        if self._status is None:
            yield self
        else:
            with self._status:
                yield self


@contextmanager
def planning_work() -> Iterator[Progress]:
    """Progress while torch is loaded and a model is built: what the user's model prints goes to stderr too."""
    with Progress(Console(stderr=True)).shown() as progress, redirect_stdout(sys.stderr):
        progress("loading torch")
        yield progress
