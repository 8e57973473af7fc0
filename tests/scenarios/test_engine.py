"""Faults of a story are named by file and line; differences are shown, or written into it."""

from pathlib import Path

import pytest

from tests.scenarios.parser import ScenarioError
from tests.scenarios.runner import run

STORY = """A story

> stream create S subjects=s

Two messages are published.

> publish s x count=2
  seq 1-3
  and more
> messages S
"""
WHAT_HAPPENS = """A story

> stream create S subjects=s
  created

Two messages are published.

> publish s x count=2
  seq 1-2
> messages S
  seq 1 s "x1" at 0s
  seq 2 s "x2" at 0s
"""


def told(folder: Path, text: str, *, update: bool = False) -> tuple[str, str]:
    path = folder / "story.txt"
    path.write_text(text)
    difference = run(path, folder / "data", update=update)
    return difference, path.read_text()


def test_story_that_agrees_has_no_difference(tmp_path: Path) -> None:
    assert told(tmp_path, WHAT_HAPPENS) == ("", WHAT_HAPPENS)


def test_story_that_differs_is_shown_as_a_diff_and_left_alone(tmp_path: Path) -> None:
    difference, text = told(tmp_path, STORY)
    assert text == STORY
    assert difference.splitlines()[0] == f"--- {tmp_path}/story.txt"
    changes = [line for line in difference.splitlines()[2:] if line[0] in "+-"]
    assert changes == [
        "+  created",
        "-  seq 1-3",
        "-  and more",
        "+  seq 1-2",
        '+  seq 1 s "x1" at 0s',
        '+  seq 2 s "x2" at 0s',
    ]


def test_update_writes_the_outputs_and_keeps_the_rest(tmp_path: Path) -> None:
    assert told(tmp_path, STORY, update=True) == ("", WHAT_HAPPENS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("> strem create S", "there is no command 'strem'"),
        ("> stream", "there is no command 'stream'"),
        ("> publish", "subject is missing"),
        ("> publish s x y", "not understood: y"),
        ("> publish s x colour=red", "not understood: colour="),
        ("> publish s x count=two", "count is a whole number"),
        ("> publish s x count=0", "count is at least 1"),
        ("> publish s x size=3", "by its text or by its size"),
        ("> publish s 'x", "No closing quotation"),
        ("> publish s x count=1 count=2", "count is given twice"),
        ("> stream create S subjects=s colour=red", "colour: Extra inputs are not permitted"),
        ("> stream create S max_msgs=many", "max_msgs: Input should be a valid integer"),
        ("> consumer create S c ephemeral=maybe", "ephemeral is yes or no"),
        ("> ack S c 1", "c was never delivered seq 1"),
        ("> nak S c 1 delay=soon", "delay: must be a duration"),
        ("> ack S c 1 delay=1s", "not understood: delay="),
        ("> advance -1s", "time goes forward only"),
        ("> cancel 1", "pull 1 does not wait"),
        (">publish s x", "a command begins with"),
        ("   >publish s x", "output that belongs to no command"),
        ("\t> publish s x", "a command begins with"),
        ("> publish s x ", "spaces at the end of the line"),
    ],
)
def test_fault_of_a_story_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=r"story\.txt:5: ") as raised:
        told(tmp_path, f"A story\n\n> stream create S subjects=s\n\n{line}\n", update=True)
    assert message in str(raised.value)


def test_story_without_commands_is_at_fault(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"story\.txt:1: a story without commands"):
        told(tmp_path, "A story\n")
