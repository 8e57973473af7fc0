"""Print the part of requirements.lock that some distributions of this workspace need.

Usage: python lock.py requirements.lock MEMBER...; a member is a folder with a pyproject.toml.  The
comments of the lock say who asked for each package, so nothing has to be resolved again.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

BUILD: Final = {"editables", "hatchling", "setuptools"}
"""The packages with which `make install` builds distributions."""
OURS: Final = "contrail-"
NOT_SERVED: Final = {"pandas"}
"""Extras for users of the SDK, which no service needs."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_VIA: Final = re.compile(r"^    # +(?:via )?([A-Za-z0-9._-]+)$", re.MULTILINE)


def asked_for(member: Path) -> set[str]:
    """The packages that a distribution names, with the extras that a service may use."""
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).items()
    served = [packages for name, packages in extras if name not in NOT_SERVED]
    lists = [project.get("dependencies", []), *served]
    names = {normal(requirement) for each in lists for requirement in each}
    return {name for name in names if not name.startswith(OURS)}


def normal(requirement: str) -> str:
    """The normalised name at the start of a requirement."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def sections(lock: str) -> dict[str, str]:
    """The text of the lock for each package: version, hashes, and the packages that require it."""
    parts = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return {normal(part): part for part in parts if "==" in part}


def needed(packages: dict[str, str], roots: set[str]) -> set[str]:
    """``roots`` and all packages they require, directly or indirectly."""
    asking = {name: {normal(by) for by in _VIA.findall(text)} for name, text in packages.items()}
    found = set(roots)
    while more := {name for name, by in asking.items() if by & found} - found:
        found |= more
    return found


def main(arguments: list[str]) -> int:
    """Print the selection in the order of the lock; return 1 if the lock lacks a package."""
    lock, *members = map(Path, arguments)
    packages = sections(lock.read_text(encoding="utf-8"))
    roots = BUILD.union(*map(asked_for, members))
    if missing := roots - packages.keys():
        print(f"{lock} lacks {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    found = needed(packages, roots)
    sys.stdout.write("".join(text for name, text in packages.items() if name in found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
