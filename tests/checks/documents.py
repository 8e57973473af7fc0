"""Checks of documents: links have targets, decisions have one form and one entry in the index."""

import re
from collections.abc import Iterable, Mapping
from posixpath import dirname, normpath

from tests.checks.repository import ROOT, File

DECISION = re.compile(r"docs/decisions/(\d{4})-[\w-]+\.md")
DECISION_LINES_MAX = 25
DECISION_COLUMNS_MAX = 150
DECISION_FORM = re.compile(r"Decision Why Against(?: Not reached)?")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?P<path>[^)\s#:]*)(?:#(?P<anchor>[^)\s]+))?\)")
PART = re.compile(r"^\*\*([^*]+)\.\*\*", re.MULTILINE)


def malformed_decision(file: File) -> list[str]:
    """Decisions without the required form: a numbered title, the parts in order, the size.

    Between title and parts there may be one line that names the decision that replaces this one.
    """
    found = DECISION.fullmatch(file.path)
    lines = file.text.splitlines()
    first, _, text = file.text.partition("\n\n")
    opening = PART.split(text)[0]
    parts = " ".join(PART.findall(text))
    wrong = {
        "the name has no number": not found,
        "the title has not the number of the file": (
            found and not first.startswith(f"# {int(found[1])}. ")
        ),
        f"more than {DECISION_LINES_MAX} lines": len(lines) > DECISION_LINES_MAX,
        f"a line of more than {DECISION_COLUMNS_MAX} characters": (
            max(map(len, lines)) > DECISION_COLUMNS_MAX
        ),
        f"the parts are: {parts}": not DECISION_FORM.fullmatch(parts),
        "text before the first part": opening and not opening.startswith("Superseded "),
    }
    return [f"{file.path}: {problem}" for problem, is_so in wrong.items() if is_so]


def not_listed_once(index: File, paths: Iterable[str]) -> list[str]:
    """Files in the folder of the index to which it does not link exactly once."""
    listed = [link["path"] for link in LINK.finditer(index.text)]
    names = (path.rpartition("/")[2] for path in paths)
    return [f"{index.path}: {name} is not listed once" for name in names if listed.count(name) != 1]


def dead_links(file: File, files: Mapping[str, File]) -> list[str]:
    """Relative links to files, folders or headings that do not exist."""
    problems = []
    for link in LINK.finditer(file.text):
        target = normpath(f"{dirname(file.path)}/{link['path']}") if link["path"] else file.path
        target = target.removeprefix("/")
        if link["anchor"] and target in files:
            found = link["anchor"] in _anchors(files[target])
        else:
            found = (
                target in files
                or any(path.startswith(f"{target}/") for path in files)
                # Pictures are no text files.
                or (target.endswith(".png") and (ROOT / target).is_file())
            )
        if not found:
            problems.append(f"{file.path}: dead link {link[0]}")
    return problems


def _anchors(file: File) -> set[str]:
    """The anchors of the headings: lower case, without punctuation, joined by hyphens."""
    titles = HEADING.findall(file.text)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
