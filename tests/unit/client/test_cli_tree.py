"""Every command of the tree: its help, and how it ends when things are not as they should be."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from contrail_client.cli import show
from contrail_client.cli.main import app
from tests.support.command import ROOT, run_contrail
from tests.support.each import each
from tests.support.ports import HOST, free_port

SERVERS = {("serve",), ("storage",), ("api",), ("gateway",)}
"""They run until they are stopped, and talk to no server."""

LOCAL = {
    ("config",),
    *(("cluster", name) for name in ("start-node", "stop")),
    *(("context", name) for name in ("add", "ls", "rm", "select", "unselect")),
}
CHECKS = {("server", "check", what) for what in ("connection", "consumer", "stream")}
"""They need no server."""

VALUES = {
    "STREAM": "S",
    "CONSUMER": "c",
    "SEQ": "1",
    "ERASURE_ID": "e",
    "SUBJECT": "s",
    "NAME": "n",
}
PYTHONISMS = (
    "None", "True", "False", "<bool>", "<str>", "<int>", "list[", "Path", "StrEnum", "[default: (",
)  # fmt: skip


def tree(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below one, with the words that lead to it."""
    for name, one in getattr(command, "commands", {}).items():
        yield (*path, name), one
        yield from tree(one, (*path, name))


ALL = dict(tree(ROOT))
LEAVES = {path: one for path, one in ALL.items() if not hasattr(one, "commands")}
CLIENT = {path: LEAVES[path] for path in LEAVES.keys() - SERVERS - LOCAL - CHECKS}


def named(paths: Any) -> Any:
    return each("path", sorted(paths), ids=" ".join)


@pytest.fixture(autouse=True)
def audible() -> Iterator[None]:
    """A console stays quiet after a broken pipe, which is right for a process that ends then."""
    yield
    show.console.quiet = show.errors.quiet = False


@pytest.fixture
def silent_server() -> str:
    """The address of a port at which nobody listens."""
    return f"http://{HOST}:{free_port()}"


def contrail(*arguments: str, **environ: str | None) -> Result:
    env = {"CONTRAIL_URL": None, "CONTRAIL_TOKEN": None, "COLUMNS": "400", **environ}
    return run_contrail(*arguments, env=env)


def call_of(path: tuple[str, ...], folder: Path) -> list[str]:
    """The least that the command takes, with a yes where it would ask."""
    archive = folder / "archive"
    archive.write_bytes(b"")
    given = list(path)
    for parameter in LEAVES[path].params:
        if parameter.param_type_name == "argument" and parameter.required:
            known = {**VALUES, "FILE": str(archive)}
            given.append(known[parameter.metavar])
        if "--yes" in parameter.opts:
            given.append("--yes")
    if path == ("stream", "erase"):
        given.append("1")
    return given


# Help --------------------------------------------------------------------------------------------


@named(ALL)
def test_help_describes_everything_as_it_is_written(path: tuple[str, ...]) -> None:
    result = contrail(*path, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    shown = " ".join(result.stdout.replace("│", " ").split())
    command = ALL[path]
    assert command.help
    for parameter in command.params:
        if parameter.name in ("install_completion", "show_completion"):
            continue
        assert parameter.help, parameter.name
        # Brackets are escaped for Rich, which would take them for markup.
        assert " ".join(parameter.help.replace("\\[", "[").split()) in shown
        for option in parameter.opts:
            assert option in shown or parameter.param_type_name == "argument"
    for pythonism in PYTHONISMS:
        assert pythonism not in shown, pythonism


def test_help_of_the_root_lists_every_command() -> None:
    shown = contrail("--help").stdout
    assert all(path[0] in shown for path in ALL)
    assert "[client]" in contrail("stream", "ls", "--help").stdout


# Without a server --------------------------------------------------------------------------------


@named(CLIENT)
def test_without_a_server_it_ends_with_1_and_one_line(
    path: tuple[str, ...], silent_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_client.calls.Retries.backoff_s", lambda *_: 0.0)
    call = [*call_of(path, tmp_path), "--server", silent_server]
    status = 2 if path == ("cluster", "status") else 1  # a monitor tells "degraded" from "away"
    result = contrail(*call)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("contrail: ")
    assert "contrail serve" in result.stderr
    for arguments in ([*call, "--json"], ["--json", *call]):
        result = contrail(*arguments)
        told = json.loads(result.stderr)
        assert (told["error"], told["exit_status"]) == ("unreachable", status)
        assert result.stdout == ""


@named(LEAVES)
@each("bad", [("--nonsense",), ("--config", "/nowhere/c.toml"), ("a",) * 9], ids=" ".join)
def test_misuse_ends_with_2_and_one_line(path: tuple[str, ...], bad: tuple[str, ...]) -> None:
    if path == ("stream", "erase") and bad[0] == "a":
        bad = ("S", "not-a-number")
    result = contrail(*path, *bad)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    if not {path} & SERVERS:
        told = json.loads(contrail("--json", *path, *bad).stderr)
        assert (told["error"], told["exit_status"]) == ("misused", 2)


# Where output cannot go --------------------------------------------------------------------------


def run_into(stdout: Any, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """The status and stderr of a command whose stdout is `stdout`."""
    errors = io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.stderr", errors)
    with pytest.raises(SystemExit) as ended:
        app(arguments, prog_name="contrail")
    return ended.value.code, errors.getvalue()


@pytest.mark.parametrize("arguments", [("config",), ("config", "--json"), ("--version",)])
def test_full_disk_behind_stdout_is_reported_in_one_line(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        status, told = run_into(full, *arguments, monkeypatch=monkeypatch)
    assert (status, told.count("\n")) == (1, 1)
    assert "standard output: No space left on device" in told


@pytest.mark.parametrize("arguments", [("config",), ("config", "--json"), ("--help",)])
def test_reader_that_went_away_is_no_news(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w", encoding="utf-8") as pipe:
        status, told = run_into(pipe, *arguments, monkeypatch=monkeypatch)
    assert (status, told) == (1, "")


def test_closed_stdout_is_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    call = ("next", "S", "c", "--server", silent_server)
    status, told = run_into(None, *call, monkeypatch=monkeypatch)
    assert (status, told) == (1, "contrail: standard output is closed\n")


# Names that nobody knows -------------------------------------------------------------------------


def test_unknown_variable_is_warned_about_once_and_the_nearest_named() -> None:
    result = contrail("config", "--json", CONTRAIL_DATA_DRI="x", CONTRAIL_QQQ="y")
    warnings = [json.loads(line)["warning"] for line in result.stderr.splitlines()]
    assert warnings == [
        "CONTRAIL_DATA_DRI is set, but is not a known setting, did you mean CONTRAIL_DATA_DIR?",
        "CONTRAIL_QQQ is set, but is not a known setting",
    ]
    assert result.exit_code == 0
    assert contrail("config").stderr == ""


@pytest.mark.parametrize(
    ("written", "arguments", "sentence"),
    [
        ("prot = 1", ("config",), "did you mean port?"),
        ('[client]\nulr = "x"', ("stream", "ls"), "did you mean url?"),
        ("port = ", ("config",), "Invalid value"),
        ("[client]\nurl = 5", ("stream", "ls"), "url must be a string"),
    ],
)
def test_mistakes_in_a_settings_file_are_reported(
    tmp_path: Path, written: str, arguments: tuple[str, ...], sentence: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(written)
    result = contrail(*arguments, "--config", str(file))
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff", b"two\nlines"])
def test_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    result = contrail("stream", "ls", "--token-file", str(file))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_mistyped_command_is_suggested() -> None:
    result = contrail("strem", "ls")
    assert result.exit_code == 2
    assert "Did you mean 'stream'" in result.stderr
