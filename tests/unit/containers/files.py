"""The container files as data: the parsed Dockerfile, and the parsed compose file."""

import json
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.checks.repository import ROOT


@dataclass(frozen=True)
class Instruction:
    """One instruction of the Dockerfile, its continued lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The text as words, without the instruction's own flags."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


@cache
def stages() -> dict[str, list[Instruction]]:
    """The instructions of each stage by its name; the first of a stage is FROM."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, list[Instruction]] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = found.setdefault(rest.split()[-1], [])
        stage.append(Instruction(name, rest.strip()))
    return found


def texts(stage: str, name: str) -> list[str]:
    """The texts of all instructions called ``name`` of a stage."""
    return [each.text for each in stages()[stage] if each.name == name]


def image_environment(image: str = "service") -> dict[str, str]:
    """What ENV sets in the image, as it is written."""
    lines = texts("runtime", "ENV") + texts(image, "ENV")
    return dict(word.split("=", 1) for text in lines for word in shlex.split(text))


def health_command(image: str = "service") -> list[str]:
    """The image's health check, to be run with the files of this checkout."""
    [text] = texts(image, "HEALTHCHECK")
    return here(json.loads(text.partition("CMD ")[2]))


def here(command: list[str]) -> list[str]:
    """A command of the image, with the files of this checkout."""
    return [word.replace("/opt/contrail", str(ROOT)) for word in command]


@cache
def compose() -> dict[str, Any]:
    """The compose file, anchors and merges resolved."""
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def services() -> dict[str, dict[str, Any]]:
    """The services of the compose file by name."""
    found = compose()["services"]
    assert isinstance(found, dict)
    return found
