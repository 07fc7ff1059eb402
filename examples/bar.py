"""Shows progress: a bar in a terminal, lines in a file."""

from collections.abc import Generator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn


class Bar(Progress):
    """A progress bar that also names the current activity."""

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        columns = ["{task.description}", BarColumn(), MofNCompleteColumn()]
        super().__init__(*columns, TimeElapsedColumn(), console=console)
        self._task = self.add_task("", total=total, completed=done)
        self._said: set[str] = set()

    def say(self, activity: str) -> None:
        """Shows the activity next to the bar; a file gets one line per new activity."""
        self.update(self._task, description=activity)
        if not self.console.is_terminal and activity not in self._said:
            self.console.print(activity)
        self._said.add(activity)

    def step(self) -> None:
        """Advances the bar by one."""
        self.advance(self._task)

    def show(self, done: int) -> None:
        """Sets the bar to `done`."""
        self.update(self._task, completed=done)

    def compiling(self, programs: list[Any]) -> Generator[Any, None, None]:
        """Yields the programs and shows which one is being compiled."""
        for number, program in enumerate(programs, start=1):
            self.say(f"compiling {number}/{len(programs)}")
            yield program
        self.say("training")
