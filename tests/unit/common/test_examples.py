"""Property tests try the same examples, whatever ran before them."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def tried() -> list[tuple[int, str]]:
    """The examples of a property test."""
    found = []

    @given(st.integers(), st.text())
    def each(number: int, text: str) -> None:
        found.append((number, text))

    each()
    return found


@pytest.mark.skipif(not settings().derandomize, reason="this profile looks for new examples")
def test_import_of_a_module_changes_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tried()
    constants = [f"{number}, 'constant {number}'" for number in range(100_000, 100_400)]
    (tmp_path / "imported_for_examples.py").write_text(f"NUMBERS = [{', '.join(constants)}]")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("imported_for_examples")
    assert tried() == before
    del sys.modules["imported_for_examples"]
