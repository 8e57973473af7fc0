"""How commands end when the server refuses, the token is wrong, files are bad or Ctrl-C comes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.client_rig import new_stream
from tests.contract.test_client_cli import TIMEOUT_S, Shell
from tests.support.servers import ServerProcess
from tests.unit.client.test_cli_tree import CLIENT, call_of


@pytest.fixture
def shell(live: ServerProcess) -> Shell:
    return Shell(live.url, new_stream(live.url))


@pytest.mark.parametrize("command", ["create", "edit"])
@pytest.mark.parametrize(
    ("resource", "mistyped", "meant"),
    [("stream", "max_mgs", "max_msgs"), ("consumer", "ack_wiat", "ack_wait")],
)
def test_unknown_field_is_answered_with_the_nearest(
    shell: Shell, command: str, resource: str, mistyped: str, meant: str
) -> None:
    names = [shell.stream] if resource == "stream" else [shell.stream, "c"]
    if resource == "consumer":
        shell.run("consumer", "create", *names)
    result = shell.try_(resource, command, *names, "--set", f"{mistyped}=5")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr == f"contrail: {mistyped}: unknown field, did you mean {meant}? (422)\n"
    result = shell.try_("--json", resource, command, *names, "--set", f"{mistyped}=5")
    output = json.loads(result.stderr)
    assert (output["status"], output["errors"][0]["pointer"]) == (422, f"/{mistyped}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("stream", "snapshot", "{stream}", "{folder}/missing/archive"), "No such file"),
        (("stream", "restore", "NEW", "{folder}/garbage"), "archive"),
        (("stream", "restore", "NEW", "{folder}/missing"), "does not exist"),
        (("stream", "create", "NEW", "--fields", "{folder}/garbage"), "garbage"),
        (("stream", "create", "NEW", "--fields", "{folder}/missing"), "No such file"),
        (("stream", "create", "NEW", "--fields", "{folder}"), "Is a directory"),
        (("stream", "ls", "--token-file", "{folder}/missing"), "No such file"),
        (("stream", "last", "{stream}", "--up-to-time", "yesterday"), "up_to_time"),
        (("replay", "{stream}", "--start-time", "yesterday"), "start_time"),
        (("next", "{stream}", "c", "--expires", "soon"), "expires"),
    ],
)
def test_bad_files_and_values_are_reported_in_one_line(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    shell.run("consumer", "create", shell.stream, "c")
    (tmp_path / "garbage").write_bytes(b"\xff{]")
    call = [each.format(stream=shell.stream, folder=tmp_path) for each in arguments]
    result = shell.try_(*call)
    assert result.exit_code in (1, 2)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert sentence in result.stderr
    assert json.loads(shell.try_(*call, "--json").stderr)["exit_status"] == result.exit_code


@pytest.mark.long
def test_wrong_token_ends_every_command_with_1_and_one_line(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", token="secret") as server:
        shell = Shell(server.url, "S")
        for path in sorted(CLIENT.keys() - {("rtt",)}):  # asks for what needs no token
            result = shell.try_(*call_of(path, tmp_path), "--json")
            output = json.loads(result.stderr)
            assert (result.exit_code, result.stdout) == (1, ""), path
            # A WebSocket that shows no token is closed with a code, not answered with a status.
            assert output.get("status") == 401 or output["error"] == "socket_refused", path


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_empty_fields_are_called_empty(shell: Shell, tmp_path: Path, data: bytes) -> None:
    result = shell.try_("stream", "create", "NEW", "--fields", "-", stdin=data)
    assert (result.exit_code, result.stderr) == (2, "contrail: standard input is empty\n")
    (tmp_path / "fields").write_bytes(data)
    result = shell.try_("stream", "create", "NEW", "--fields", str(tmp_path / "fields"))
    assert (result.exit_code, result.stderr) == (2, f"contrail: {tmp_path}/fields is empty\n")


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [("sub", "{}", "--start", "all"), ("sub", "{}", "c"), ("events",)]
)
def test_command_ends_once_nobody_reads_its_output(
    shell: Shell, arguments: tuple[str, ...]
) -> None:
    shell.run("consumer", "create", shell.stream, "c")
    with shell.process(*(each.format(shell.stream) for each in arguments), "--json") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        if arguments[0] == "sub":
            shell.fill(1)  # so that it waits for the next one
            assert running.stdout.readline()
        running.stdout.close()
        assert (running.wait(TIMEOUT_S), running.stderr.read()) == (1, b"")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "importing"),
    [
        (("stream", "ls"), "httpx"),
        (("stream", "ls"), "contrail_client.cli"),
        (("serve",), "uvloop"),
    ],
)
def test_ctrl_c_while_it_starts_is_quiet(
    tmp_path: Path, arguments: tuple[str, ...], importing: str
) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CONTRAIL_")}
    code = "from contrail_start import run; run()"
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**environ, "CONTRAIL_DATA_DIR": str(tmp_path / "data"), "CONTRAIL_PORT": "0"},
        text=True,
    ) as running:
        assert running.stderr is not None
        while importing not in running.stderr.readline():
            pass
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
        # A server that has come so far that it heeds signals by then ends in order.
        endings = {0, 130} if arguments == ("serve",) else {130}
        assert running.wait(TIMEOUT_S) in endings, rest[-2000:]
    assert "Traceback" not in rest
