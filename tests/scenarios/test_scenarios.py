"""Every story in this folder tells what happens."""

import os
from pathlib import Path

import pytest

from tests.scenarios.engine import COMMANDS, command_of
from tests.scenarios.parser import ScenarioError, parse
from tests.scenarios.runner import run

UPDATE = os.environ.get("CONTRAIL_UPDATE_SCENARIOS") == "1"
STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story_shows_what_happens(path: Path, tmp_path: Path) -> None:
    try:
        difference = run(path, tmp_path, update=UPDATE)
    except ScenarioError as error:
        difference = str(error)
    if difference:
        pytest.fail(difference, pytrace=False)


def test_every_command_is_used_by_a_story() -> None:
    told = {
        command_of(step.command) for path in STORIES for step in parse(path, path.read_text()).steps
    }
    assert told == set(COMMANDS)
