"""Writes the blocking client from the asynchronous one: ``python -m tests.checks.blocking``.

They differ only in a few words, which are replaced line by line. Where that is not enough, a
comment ``# blocking: ...`` gives the blocking form of its whole line.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

from tests.checks.repository import ROOT, File, repository_files

SOURCE: Final = "libs/client/src/contrail_client/"

_MARK: Final = "# Generated from "
_HEADER: Final = _MARK + "{} by `make blocking`. Change that file, not this one.\n"
_INSTEAD: Final = re.compile(r"^( *).*# blocking: (.*)$")
_WORDS: Final = [
    (r"\basynchronous\b", "blocking"),
    (r" `contrail_client\.\S+` is generated from this \w+\.", ""),
    (r"from contrail_client\.live\.\w+ import Async", "from contrail_client.live.blocking import "),
    (r"\bcontrail_client\.aio\b", "contrail_client.blocking"),
    (r"\bcontrail_client\.transport\.aio\b", "contrail_client.transport.blocking"),
    (r"\bAsyncGenerator\[(.*), None\]", r"Generator[\1, None, None]"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\basync_(?=\w)", ""),
    (r"\basync (?=def|for|with)", ""),
    (r"\bawait ", ""),
    (r"\basyncio\b", "time"),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\ba(close|closing|iter_raw|next|read)\b", r"\1"),
    (r"\bTasks of one event loop\b", "Threads"),
]
_TIDY: Final = (
    ("check", "--fix-only", "--unsafe-fixes", "--select=I,F401,UP028", "--exit-zero", "--quiet"),
    ("format", "--quiet"),
)


def blocking_path(path: str) -> str | None:
    """The path of the blocking form of an asynchronous module; None for other files."""
    folder, _, name = path.removeprefix(SOURCE).partition("/")
    if not path.startswith(SOURCE) or not (folder == "aio" or name == "aio.py"):
        return None
    return path.replace("/aio", "/blocking")


def blocking_form(file: File) -> str:
    """The text of the blocking form of an asynchronous module."""
    lines = "".join(map(_blocking_line, file.text.splitlines(keepends=True)))
    return _tidied(
        _HEADER.format(file.path.removeprefix(SOURCE)) + lines, str(blocking_path(file.path))
    )


def outdated(files: Iterable[File]) -> dict[str, str | None]:
    """Paths of outdated generated modules, with their correct text; None for one to remove."""
    there = {file.path: file.text for file in files}
    wanted = {
        path: blocking_form(File(source, text))
        for source, text in there.items()
        if (path := blocking_path(source)) is not None
    }
    marked = {path for path, text in there.items() if text.startswith(_MARK)}
    both = sorted(marked | wanted.keys())
    return {path: wanted.get(path) for path in both if there.get(path) != wanted.get(path)}


def _blocking_line(line: str) -> str:
    line = _INSTEAD.sub(r"\1\2", line)
    for pattern, replacement in _WORDS:
        line = re.sub(pattern, replacement, line)
    return line


def _tidied(text: str, path: str) -> str:
    """The text with sorted imports and formatted, as if it had been written by hand."""
    for command in _TIDY:
        ruff = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={path}", "-"]
        done = subprocess.run(
            ruff, cwd=ROOT, input=text, capture_output=True, text=True, check=True
        )
        text = done.stdout
    return text


def main() -> int:
    """Write the outdated blocking modules, and remove those without a source."""
    for path, text in outdated(repository_files()).items():
        if text is None:
            (ROOT / path).unlink()
        else:
            (ROOT / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
