"""Comparing a story with what happens, or writing what happens into it."""

import difflib
from pathlib import Path

from tests.scenarios.engine import tell
from tests.scenarios.parser import parse


def run(path: Path, root: Path, *, update: bool) -> str:
    """How the story in ``path`` and what happens differ, as a unified diff; "" when they agree.

    With ``update`` the file is made to agree. The node keeps its data below ``root``. Raises
    ScenarioError when the story is at fault.
    """
    text = path.read_text()
    scenario = parse(path, text)
    told = scenario.told_with(tell(scenario, root))
    if told == text:
        return ""
    if update:
        path.write_text(told)
        return ""
    lines = difflib.unified_diff(
        text.splitlines(), told.splitlines(), str(path), "what happens", lineterm=""
    )
    return "\n".join(lines)
