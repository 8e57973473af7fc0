"""Golden files: what each release has written, and what it means.

`python -m tests.formats.golden RELEASE` adds what the files of a release lack. It changes no line:
one that is wrong is removed by hand, and only if nobody can have such bytes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.formats.fill import meaning
from tests.formats.samples import FORMATS

FOLDER: Final = Path(__file__).parent


class Golden(NamedTuple):
    """A line of a golden file."""

    release: str
    format: str
    name: str
    data: bytes
    means: Any


def releases() -> list[str]:
    """The releases with golden files, oldest first."""
    found = [path.name for path in FOLDER.iterdir() if (path / "entries.jsonl").exists()]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")])


def golden(release: str) -> Iterator[Golden]:
    """All lines of a release."""
    for path in sorted((FOLDER / release).glob("*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            data = bytes.fromhex(found["bytes"])
            yield Golden(release, path.stem, found["name"], data, found["means"])


def meaning_of(name: str, sample: str, data: bytes) -> Any:
    """What this code reads, as it stands in a golden file."""
    return json.loads(json.dumps(meaning(FORMATS[name].read(sample, data))))


def add(release: str) -> int:
    """Add lines of what this code writes; return their number."""
    folder = FOLDER / release
    folder.mkdir(exist_ok=True)
    known = {(one.format, one.name) for one in golden(release)}
    added = 0
    for name, format_ in FORMATS.items():
        with (folder / f"{name}.jsonl").open("a") as file:
            for sample, data in format_.written().items():
                if (name, sample) not in known:
                    means = meaning_of(name, sample, data)
                    line = {"name": sample, "bytes": data.hex(), "means": means}
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    added += 1
    return added


if __name__ == "__main__":
    print(f"{add(sys.argv[1])} lines added to the files of release {sys.argv[1]}")
