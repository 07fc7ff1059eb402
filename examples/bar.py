"""What a program is doing: a bar in a terminal, lines in a file."""

from collections.abc import Generator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn


class Bar(Progress):
    """How much is done, and what is being done."""

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        columns = ["{task.description}", BarColumn(), MofNCompleteColumn()]
        super().__init__(*columns, TimeElapsedColumn(), console=console)
        self._task = self.add_task("", total=total, completed=done)
        self._said: set[str] = set()

    def say(self, activity: str) -> None:
        """Shows it beside the bar; in a file it is a line, the first time."""
        self.update(self._task, description=activity)
        if not self.console.is_terminal and activity not in self._said:
            self.console.print(activity)
        self._said.add(activity)

    def step(self) -> None:
        """One more is done."""
        self.advance(self._task)

    def show(self, done: int) -> None:
        """Shows how much is done."""
        self.update(self._task, completed=done)

    def compiling(self, programs: list[Any]) -> Generator[Any, None, None]:
        """Says which of the programs is compiled."""
        for number, program in enumerate(programs, start=1):
            self.say(f"compiling {number}/{len(programs)}")
            yield program
        self.say("training")
