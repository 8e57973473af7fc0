"""The files to check: everything that a clone has, read once."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Folders that .gitignore excludes. They are listed here, so that the checks need no git.
UNTRACKED = {"__pycache__", "build", "contrail-data", "data", "dist", "reports", "spark-warehouse"}
TRACKED_DOT_FOLDERS = {".ci", ".github"}


@dataclass(frozen=True)
class File:
    """One file: its path as written in problems (relative, with slashes) and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed Python module."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def classes(self) -> Iterator[str]:
        """Names of the classes that are defined anywhere in the module."""
        return (node.name for node in self.nodes if isinstance(node, ast.ClassDef))

    @property
    def functions(self) -> Iterator[str]:
        """Names of the functions and methods that are defined anywhere in the module."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return (node.name for node in self.nodes if isinstance(node, kinds))

    @property
    def is_python(self) -> bool:
        """True for a Python module."""
        return self.path.endswith(".py")

    @property
    def is_test(self) -> bool:
        """True for files under tests/."""
        return self.path.startswith("tests/")

    @property
    def module(self) -> str | None:
        """The dotted name of a module of a distribution, None for other files."""
        found = re.search(r"(?:^|/)src/(.+)\.py$", self.path)
        return found and found[1].replace("/", ".").removesuffix(".__init__")


def repository_files(root: Path = ROOT) -> Iterator[File]:
    """Yield every text file of the repository at `root`."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if _is_tracked_folder(name))
        for name in sorted(set(names) - {".git"}):  # a worktree has a file of this name
            path = Path(folder, name)
            content = path.read_bytes()
            if b"\0" not in content:
                yield File(path.relative_to(root).as_posix(), content.decode())


def _is_tracked_folder(name: str) -> bool:
    if name.startswith("."):
        return name in TRACKED_DOT_FOLDERS
    return name not in UNTRACKED and not name.endswith(".egg-info")
