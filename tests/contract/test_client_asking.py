"""What destroys is asked for: with a terminal by a question, without one by `--yes` alone."""

import os
import pty
import signal

import pytest

from contrail_client import Contrail
from tests.contract.client_rig import new_stream
from tests.contract.test_client_cli import TIMEOUT_S, Shell
from tests.support.servers import ServerProcess

DESTRUCTIVE = [
    ("stream", "rm", "{stream}"),
    ("stream", "purge", "{stream}"),
    ("stream", "erase", "{stream}", "1"),
    ("stream", "delete-message", "{stream}", "1"),
    ("stream", "seal", "{stream}"),
    ("consumer", "rm", "{stream}", "c"),
]


@pytest.fixture
def shell(live: ServerProcess) -> Shell:
    """The command with a stream of three messages and a consumer, none of which may go."""
    shell = Shell(live.url, new_stream(live.url))
    shell.fill(3)
    shell.run("consumer", "create", shell.stream, "c")
    return shell


def is_whole(shell: Shell) -> bool:
    """Whether all that was there still is, unchanged."""
    with Contrail(shell.url) as client:
        info = client.get_stream(shell.stream)
        consumers = [each.name for each in client.list_consumers(shell.stream)]
        return (info.state.messages, consumers, info.config["sealed"]) == (3, ["c"], False)


def answered(shell: Shell, answer: bytes | signal.Signals) -> tuple[int, str]:
    """The status and stderr of `stream rm` at a terminal at which `answer` is given."""
    ours, theirs = pty.openpty()
    try:
        with shell.process("stream", "rm", shell.stream, stdin=theirs) as running:
            assert running.stderr is not None
            asked = b""
            while not asked.endswith(b"[y/N] "):
                asked += running.stderr.read(1)
            if isinstance(answer, signal.Signals):
                running.send_signal(answer)
            else:
                os.write(ours, answer)
            status = running.wait(TIMEOUT_S)
            return status, (asked + running.stderr.read()).decode()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.long
@pytest.mark.parametrize("arguments", DESTRUCTIVE, ids=lambda each: " ".join(each[:2]))
def test_without_a_terminal_it_is_refused_unless_confirmed_by_an_option(
    shell: Shell, arguments: tuple[str, ...]
) -> None:
    command = [each.format(stream=shell.stream) for each in arguments]
    for stdin in (b"", b"y\n"):
        result = shell.try_(*command, stdin=stdin)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--yes" in result.stderr
    assert is_whole(shell)
    shell.run(*command, "--yes")
    with Contrail(shell.url) as client:
        gone = shell.stream not in [info.name for info in client.list_streams()]
    assert gone or not is_whole(shell)


@pytest.mark.long
@pytest.mark.parametrize("answer", [b"n\n", b"\n", b"perhaps\n", b"\x04"])
def test_any_answer_but_yes_leaves_everything(shell: Shell, answer: bytes) -> None:
    status, output = answered(shell, answer)
    assert (status, "nothing was changed" in output) == (1, True)
    assert f"Remove stream {shell.stream} with 3 messages" in output
    assert is_whole(shell)


def test_ctrl_c_at_the_question_has_status_130(shell: Shell) -> None:
    status, output = answered(shell, signal.SIGINT)
    assert (status, "Traceback" in output) == (130, False)
    assert is_whole(shell)


def test_yes_at_the_question_removes_and_says_what(shell: Shell) -> None:
    status, _ = answered(shell, b"y\n")
    assert status == 0
    with Contrail(shell.url) as client:
        assert shell.stream not in [info.name for info in client.list_streams()]


def test_removed_objects_are_listed(shell: Shell) -> None:
    [consumer] = shell.json("consumer", "rm", shell.stream, "c", "--yes")
    assert consumer == {
        "removed": "c",
        "stream": shell.stream,
        "num_pending": 3,
        "num_ack_pending": 0,
    }
    with Contrail(shell.url) as client:
        held = client.get_stream(shell.stream).state
    [removed] = shell.json("stream", "rm", shell.stream, "--yes")
    assert removed == {
        "removed": shell.stream,
        "messages": 3,
        "bytes": held.bytes,
        "consumers": 0,
    }
