"""Log lines of ours and of libraries: one form for all of them."""

import json
import subprocess
import sys

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
