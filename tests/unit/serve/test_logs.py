"""Log lines of ours and of libraries: one form for all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, sys, warnings
import structlog
from contrail_serve.logs import configure_logs
configure_logs("info", sys.argv[1], service="api", node="n1")
structlog.get_logger("own").info("serving", url="u")
secret = "s3cret"
try:
    raise ValueError("broken")
except ValueError as error:
    logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
    structlog.get_logger("own").exception("request_failed")
logging.getLogger("asyncio").warning("socket.send() raised exception.")
logging.getLogger("asyncio").info("not told")
warnings.warn("a warning")
"""


def lines(style: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, style], capture_output=True, text=True, check=True
    )
    assert "s3cret" not in done.stderr.replace('secret = "s3cret"', "")
    return done.stderr.splitlines()


def test_every_line_is_json_from_every_logger() -> None:
    found = [json.loads(line) for line in lines("json")]
    assert [one["event"].splitlines()[0][:20] for one in found] == [
        "serving",
        "Exception in ASGI ap",
        "request_failed",
        "socket.send() raised",
        found[4]["event"].splitlines()[0][:20],
    ]
    assert "a warning" in found[4]["event"]
    for one in found:
        assert {"level", "timestamp", "service", "node"} <= one.keys()
    assert found[1]["logger"] == "uvicorn.error"
    assert "ValueError: broken" in found[1]["exception"]
    assert "ValueError: broken" in found[2]["exception"]


def test_text_names_the_error_and_no_local_variables() -> None:
    text = "\n".join(lines("text"))
    assert text.count("ValueError: broken") == 2
    assert "Exception in ASGI application" in text


@pytest.mark.parametrize("style", ["json", "text"])
@pytest.mark.parametrize("prelude", ["", "import sys; sys.stderr.close()"], ids=["full", "closed"])
def test_lines_that_cannot_be_written_are_dropped_and_the_caller_goes_on(
    style: str, prelude: str
) -> None:
    ending = "import os; os.write(1, b'went on'); os._exit(0)"
    # Closed only once it is set up: an interpreter without a stderr has other rules.
    first = 'structlog.get_logger("own").info'
    script = SCRIPT.replace(first, f"{prelude}\n{first}")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script + ending, style],
            stdout=subprocess.PIPE,
            stderr=full,
            check=False,
        )
    assert (done.returncode, done.stdout) == (os.EX_OK, b"went on")
