"""A story's text: its commands, the output expected of each, and the text with other outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_COMMAND: Final = "> "
_OUTPUT: Final = "  "


class ScenarioError(Exception):
    """The text is at fault, not what it tells of; begins with ``path:line``."""

    def __init__(self, path: Path, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, the number of its line, and the lines expected below it, without their indent."""

    line: int
    command: str
    expected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A story. ``text`` is the file as it stands, ``steps`` are its commands in order."""

    path: Path
    text: str
    steps: list[Step]

    def told_with(self, outputs: Sequence[list[str]]) -> str:
        """The text with the outputs of the steps replaced; prose and commands stay as they are."""
        return "".join(f"{line}\n" for line in self._lines_with(outputs))

    def _lines_with(self, outputs: Sequence[list[str]]) -> Iterator[str]:
        by_line = {step.line: output for step, output in zip(self.steps, outputs, strict=True)}
        for number, line in enumerate(self.text.splitlines(), start=1):
            if not line.startswith(_OUTPUT):
                yield line
            for told in by_line.get(number, ()):
                yield _OUTPUT + told


def parse(path: Path, text: str) -> Scenario:
    """Raises ScenarioError for a line that is none of the three kinds, or out of place."""
    steps: list[Step] = []
    in_step = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line != line.rstrip():
            raise ScenarioError(path, number, "spaces at the end of the line")
        if line.startswith(_COMMAND):
            steps.append(Step(number, line.removeprefix(_COMMAND)))
            in_step = True
        elif line.startswith(_OUTPUT):
            if not in_step:
                raise ScenarioError(path, number, "output that belongs to no command")
            steps[-1].expected.append(line.removeprefix(_OUTPUT))
        elif line.startswith((">", " ", "\t")):
            raise ScenarioError(path, number, 'a command begins with "> ", output with two spaces')
        else:
            in_step = False
    if not steps:
        raise ScenarioError(path, 1, "a story without commands")
    return Scenario(path, text, steps)
