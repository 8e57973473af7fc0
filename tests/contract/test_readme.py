"""The examples of the READMEs and of the pages in docs/ run in order, and print what they show.

Blocks in ``sh`` and ``python`` are run; blocks in any other language are not. In ``sh`` a comment
line is output of the commands above it. In ``python`` so is a comment line at the end of a block,
and the comment after a ``print``. ``...`` stands for anything. A command with the comment ``# 404``
is expected to be refused.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.checks.repository import ROOT
from tests.support.servers import ServerProcess

TIMEOUT_S = 900.0
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^(?: *print\(.*\)  )?# (.*)$", re.MULTILINE)
STRICT = 'curl() { command curl --fail-with-body --silent --show-error "$@" && echo; }\n'
SEPARATOR = "\f\n"
ONE_BY_ONE = f"""
import sys
for number, text in enumerate(sys.argv[1:]):
    if number:
        print({SEPARATOR!r}, end="")
    exec(compile(text, f"block {{number + 1}}", "exec"), {{"__name__": "__main__"}})
"""
"""Runs programs in one interpreter, each with names of its own."""
# Run by tests/spark, which starts Spark once.
SPARK = re.compile(r"contrail_spark|spark\.")


def examples(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each block of a page that is to be run."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, text) for language, text in found if not SPARK.search(text)]


DOCUMENTS = [ROOT / "README.md", ROOT / "libs/client/README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [page for page in DOCUMENTS if examples(page)]


def run(language: str, texts: list[str], url: str, folder: Path) -> list[str]:
    """What programs print; any failure of one or of a command in it fails the test."""
    here = urlsplit(url).netloc
    script = SEPARATOR.join(texts).replace("localhost:7420", here).replace("127.0.0.1:7420", here)
    if language == "sh":
        # A tail has no end; what it has to show at once is enough.
        script = re.sub(
            r"^curl -N (.*?)(?: +#.*)?$", r"curl -N -m 2 \1 || test $? = 28", script, flags=re.M
        )
        script = re.sub(r"^(curl .*?) +# 4\d\d$", r"\1 || test $? = 22", script, flags=re.M)
        contrail = f"contrail() {{ '{sys.executable}' -m contrail_client \"$@\"; }}\n"
        command = ["sh", "-c", f"set -eu\n{STRICT}{contrail}{script}"]
    else:
        command = [sys.executable, "-c", ONE_BY_ONE, *script.split(SEPARATOR)]
    settings = {k: v for k, v in os.environ.items() if not k.startswith("CONTRAIL_")}
    done = subprocess.run(
        command,
        env={**settings, "CONTRAIL_URL": url, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout.split(SEPARATOR)


def expected(language: str, text: str) -> list[str]:
    """What a program is to print, in order, as the page shows it."""
    if language == "python":
        return PRINTED.findall(text)
    return [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]


def check_output(shown: list[str], printed: str) -> None:
    """Assert that all of ``shown`` is in ``printed``, one after the other."""
    position = 0
    for line in shown:
        pattern = re.escape(line).replace(r"\.\.\.", ".*?")
        found = re.compile(pattern, re.IGNORECASE).search(printed, position)
        assert found, f"not printed: {line}\nbut: {printed[position:]}"
        position = found.end()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are curl commands")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        for language, group in itertools.groupby(examples(page), lambda block: block[0]):
            texts = [text for _, text in group]
            if language == "sh":  # Commands of one page share a shell, as they would for a reader.
                texts = ["\n".join(texts)]
            printed = run(language, texts, server.url, tmp_path)
            for text, output in zip(texts, printed, strict=True):
                check_output(expected(language, text), output)


def test_output_that_a_page_shows_and_nothing_prints_is_found() -> None:
    check_output(['{"seq":...}', "done"], '{"seq":7}\ndone\n')
    with pytest.raises(AssertionError, match="not printed: done"):
        check_output(['{"seq":...}', "done"], 'done\n{"seq":7}\n')
    assert expected("sh", "curl x  # not output\n# 201\n") == ["201"]
    assert expected("python", "print(1)  # 1\nx = 2  # not output\n# 3\n") == ["1", "3"]
