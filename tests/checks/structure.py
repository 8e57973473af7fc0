"""Figures of how easy the code is to find and follow: ``python -m tests.checks.structure``."""

import asyncio
import io
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

from tests.checks.packaging import root_packages
from tests.checks.repository import ROOT, File, repository_files
from tests.walkthrough.walk import walk

OWNERS_MANY = 3
_RULER = re.compile(r"# .*-{5,}$")
_DIRECTIVE = re.compile(r"# (?:noqa|fmt|type|pragma|mypy)\b")
_PUBLISH_VERB = re.compile(r"_?(?:publish|append)(?:ed)?(?:_batch|_each|_sharded)?(?:_then)?")
_LINK_TO_LOG = re.compile(
    r"contrail_(?:link|common\.link|storage\.(?!core|store|seal|wal|upkeep|repair))"
)


def fullest_folder(files: Iterable[File]) -> tuple[int, str]:
    """The largest number of modules in one folder, and that folder."""
    folders = Counter(
        file.path.rpartition("/")[0] for file in files if not file.path.endswith("__init__.py")
    )
    folder, count = folders.most_common(1)[0]
    return count, folder


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Circles in a graph of imports, each with its start at both ends.

    To find the next circle, one arrow of each is removed. So only one is found of several circles
    that share this arrow.
    """
    left = {name: set(others) for name, others in arrows.items()}
    found = []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            circle = error.args[1]  # each module imports the one before it
            found.append(circle[::-1])
            left[circle[1]].discard(circle[0])
        else:
            return found


def module_arrows(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {
        module: graph.find_modules_directly_imported_by(module) & graph.modules
        for module in graph.modules
    }


def package_arrows(arrows: Mapping[str, Iterable[str]], packages: set[str]) -> dict[str, set[str]]:
    """The sibling packages that each package imports, directly or in a module below it."""
    between: dict[str, set[str]] = defaultdict(set)
    pairs = ((module, other) for module, others in arrows.items() for other in others)
    for module, other in pairs:
        side_by_side = zip(_lineage(module), _lineage(other), strict=False)
        parting = next(((one, two) for one, two in side_by_side if one != two), None)
        if parting is not None and packages.issuperset(parting):
            between[parting[0]].add(parting[1])
    return between


def _lineage(module: str) -> Iterator[str]:
    """The packages that contain a module, from the outermost to the module itself."""
    parts = module.split(".")
    return (".".join(parts[: at + 1]) for at in range(len(parts)))


def comment_lines(file: File) -> int:
    """Lines with a comment for people: not a ruler, and not a directive for a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    return sum(
        token.type == tokenize.COMMENT
        and not _RULER.match(token.string)
        and not _DIRECTIVE.match(token.string)
        for token in tokens
    )


def shared_names(files: Iterable[File]) -> dict[str, int]:
    """Names of three or more classes; a leading underscore does not make another name."""
    owners = Counter(name for file in files for name in {_bare(one) for one in file.classes})
    return {name: count for name, count in owners.most_common() if count >= OWNERS_MANY}


def _bare(name: str) -> str:
    return name.lstrip("_")


def publish_verbs(files: Iterable[File]) -> list[str]:
    """Definitions of publish or append, as a method or not, between the link and the log."""
    return [
        f"{file.module}.{name}"
        for file in files
        if _LINK_TO_LOG.match(file.module or "")
        for name in file.functions
        if _PUBLISH_VERB.fullmatch(name)
    ]


def subject_lengths(commits: int) -> list[int]:
    """Lengths of the subjects of the newest commits, without merges; none outside a checkout."""
    command = ["git", "log", "--no-merges", f"-{commits}", "--format=%s"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [len(line) for line in found.stdout.splitlines()]


def figures() -> Iterator[tuple[str, str]]:
    """Names and values of the figures, in the order in which to show them."""
    with tempfile.TemporaryDirectory() as folder:
        published = asyncio.run(walk(Path(folder) / "data")).publish_calls
    yield (
        "one publish, socket to answer",
        f"{published.calls} calls, {published.functions} functions, {len(published.files)} files",
    )
    modules = [file for file in repository_files() if file.module and not file.is_test]
    count, where = fullest_folder(modules)
    yield "largest flat folder of modules", f"{count} ({where})"
    graph = grimp.build_graph(*root_packages(), exclude_type_checking_imports=True)
    arrows = module_arrows(graph)
    packages = {file.module for file in modules if file.path.endswith("__init__.py")}
    circled = circles(arrows), circles(package_arrows(arrows, {str(name) for name in packages}))
    yield "circles of imports (files; packages)", "; ".join(str(len(each)) for each in circled)
    lines = sum(file.text.count("\n") for file in modules)
    yield "real comments", f"{sum(map(comment_lines, modules)) / lines:.1%} of {lines} lines"
    shared = shared_names(modules)
    named = ", ".join(f"{name} x{count}" for name, count in shared.items())
    yield f"names with {OWNERS_MANY} or more owners", f"{len(shared)} ({named})"
    yield "definitions of the verb publish, link to log", str(len(publish_verbs(modules)))
    lengths = subject_lengths(100)
    if lengths:
        yield "median subject of the last 100 commits", f"{statistics.median(lengths):.0f}"


def main() -> int:
    """Print the figures."""
    for what, result in figures():
        print(f"{what:48} {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
