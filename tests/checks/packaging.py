"""Checks of the distributions: declared dependencies, one version, classified vocabulary.

All members share one environment. An undeclared import therefore works here, and fails where only
that distribution is installed. Only a check can find it.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator

from tests.checks.repository import ROOT, File

# The sockets of the link do IO, and `publishing` waits; contract, frames and methods are pure.
VOCABULARY = re.compile(
    r"^contrail_(common\.(?!__about__$|columns$)"
    r"|link\.(?!publishing$|routed(\.(flows|leaders|link|publishing|search))?$"
    r"|tcp(\.(channel|client|connection|listeners|metrics|server))?$))"
)
CORE = re.compile(r"^contrail_\w+\.core(\.|$)")


def root_packages() -> list[str]:
    """The packages to which the import contracts apply."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["importlinter"]["root_packages"])


def undeclared_imports(files: Iterable[File]) -> list[str]:
    """Imports that are missing in the pyproject.toml of the importing distribution."""
    files = list(files)
    problems = []
    for project in files:
        if not project.path.endswith("/pyproject.toml"):
            continue
        folder = project.path.removesuffix("pyproject.toml")
        modules = [file for file in files if file.module and file.path.startswith(folder + "src/")]
        declared = set(_declared(project)) | {
            str(file.module).partition(".")[0] for file in modules
        }
        problems += [
            f"{file.path}:{line}: {name} is not declared in {project.path}"
            for file in modules
            for name, line in _imports(file)
            if name not in declared and name not in sys.stdlib_module_names
        ]
    return problems


def undocumented_version(about: File, changelog: File) -> list[str]:
    """The version of the distributions, if the changelog has no section for it."""
    version = re.findall(r'__version__ = "(.+)"', about.text)[0]
    documented = re.findall(r"^## (\S+)", changelog.text, re.MULTILINE)
    return [] if version in documented else [f"{changelog.path}: no section for {version}"]


def impure_vocabulary(files: Iterable[File], pure: set[str]) -> list[str]:
    """Modules of the vocabulary and of the link that are not declared pure.

    Also modules that are declared pure and do not exist: such a contract protects nothing.
    """
    found = {file.module for file in files if file.module and VOCABULARY.match(file.module)}
    return [f"{name}: not declared pure" for name in sorted(found - pure)] + [
        f"{name}: declared pure, but missing" for name in sorted(pure - found)
    ]


def is_core(file: File) -> bool:
    """True for a module of a pure core."""
    return bool(file.module and CORE.match(file.module))


def _declared(project: File) -> Iterator[str]:
    table = tomllib.loads(project.text)["project"]
    extras = table.get("optional-dependencies", {})
    for requirement in [
        *table["dependencies"],
        *(each for extra in extras.values() for each in extra),
    ]:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        yield name.replace("-", "_")


def _imports(file: File) -> Iterator[tuple[str, int]]:
    for node in file.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0], node.lineno
