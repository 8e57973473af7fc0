"""Checks of any text: headings, paths of one machine, registry addresses, unfinished marks."""

import re

from tests.checks.repository import File

PAGE_LINES_MAX = 150
PAGE_WIDTH_MAX = 120

FENCE = re.compile(r"^(```|~~~)")
HEADING_1 = re.compile(r"^# ")
# Written with character classes, so that this file does not match itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/}])/(?:[r]oot|[h]ome/\w|[U]sers/\w|[w]ork)(?=[/\s\"'`,;)]|\w)"
)
REGISTRY = re.compile(
    r"[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.org|[p]roxy\.golang\.org|[-]-index-url"
)
UNFINISHED = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b")
PINNED = re.compile(
    r"^[\w.-]+==\S+ \\\n(?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE
)


def top_headings(file: File) -> list[str]:
    """Documents that do not have exactly one heading of the first level."""
    fenced = False
    count = 0
    for line in file.text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced and HEADING_1.match(line):
            count += 1
    return [] if count == 1 else [f"{file.path}: {count} headings of the first level"]


def long_page(file: File) -> list[str]:
    """Pages that are too long to read: too many lines, or too wide ones outside of tables."""
    lines = file.text.splitlines()
    problems = [
        f"{file.path}:{number}: {len(line)} characters"
        for number, line in enumerate(lines, start=1)
        if len(line) > PAGE_WIDTH_MAX and not line.startswith("|")
    ]
    if len(lines) > PAGE_LINES_MAX:
        problems.append(f"{file.path}: the page has {len(lines)} lines")
    return problems


def machine_paths(file: File) -> list[str]:
    """Absolute paths that exist on one machine only."""
    return _lines(file, MACHINE_PATH, "path of one machine")


def registry_addresses(file: File) -> list[str]:
    """Addresses of package registries: the machine that installs chooses its registry."""
    return _lines(file, REGISTRY, "address of a registry")


def unfinished(file: File) -> list[str]:
    """Marks of work left for later."""
    return _lines(file, UNFINISHED, "unfinished")


def unpinned(file: File) -> list[str]:
    """Lines of a lock file that are neither a version with its hashes nor a comment."""
    rest = PINNED.sub("", file.text)
    return [
        f"{file.path}: not pinned: {line}"
        for line in rest.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _lines(file: File, pattern: re.Pattern[str], what: str) -> list[str]:
    return [
        f"{file.path}:{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(file.text.splitlines(), start=1)
        if pattern.search(line)
    ]
