"""The `contrail` command: its status, and what it prints."""

import json
from pathlib import Path

import pytest
from typer.testing import Result

from contrail_client.cli import show
from contrail_client.models import StoredMessage
from tests.support.command import run_contrail
from tests.support.each import each
from tests.support.ports import HOST, free_port


@pytest.fixture
def silent_server() -> str:
    """The address of a port at which nobody listens."""
    return f"http://{HOST}:{free_port()}"


def contrail(*arguments: str) -> Result:
    return run_contrail(*arguments, env={"CONTRAIL_URL": None, "CONTRAIL_TOKEN": None})


def test_version_is_printed() -> None:
    result = contrail("--version")
    assert (result.exit_code, result.output.count(".")) == (0, 2)


@each(
    "arguments",
    [
        ("stream", "ls", "--nonsense"),
        ("stream", "info"),
        ("stream", "ls", "--server", "nonsense"),
        ("stream", "rm", ".."),
        ("stream", "create", "S", "--config", "missing.json"),
        ("pub", "a", "x", "--header", "no-equals"),
        ("stream", "ls", "--token-file", "missing.token"),
        ("config", "--config", "missing.toml"),
        ("config", "storage", "--gateways", "a:1"),
    ],
)
def test_misuse_has_status_2_and_a_message(arguments: tuple[str, ...]) -> None:
    result = contrail(*arguments)
    assert result.exit_code == 2
    assert result.stderr


def test_server_that_is_not_there_has_status_1_and_a_hint(silent_server: str) -> None:
    result = contrail("stream", "ls", "--server", silent_server)
    assert result.exit_code == 1
    assert "contrail serve" in result.stderr
    assert result.stdout == ""


def test_config_shows_where_a_setting_came_from_and_hides_the_token(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('token = "secret"\nport = 1\n')
    result = contrail("config", "--port", "2", "--config", str(file), "--json")
    rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows["port"] == {"name": "port", "value": "2", "source": "flag"}
    assert rows["token"] == {"name": "token", "value": "(hidden)", "source": str(file)}
    assert result.exit_code == 0


def test_config_of_a_service_takes_its_flags() -> None:
    flags = ("--storage", "a:1,b:2", "--node", "east", "--access-log", "--json")
    result = contrail("config", "gateway", *flags)
    rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows["storage"] == {"name": "storage", "value": ["a:1", "b:2"], "source": "flag"}
    assert (rows["node"]["value"], rows["access_log"]["value"]) == ("east", True)
    assert rows["apis"]["source"] == "default"


def test_payload_cannot_steer_the_terminal_or_mark_up_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = StoredMessage(stream="S", seq=1, subject="a", time="t", data="\x1b[2J[red]\nü")
    show.message(message, as_json=False)
    assert capsys.readouterr().out == "1 t a \\x1b[2J[red]\\nü\n"


def test_message_is_printed_as_the_json_of_the_api(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    message = StoredMessage(stream="S", seq=1, subject="a", time="t", data_base64=b"\x00\xff")
    show.message(message, as_json=True)
    assert json.loads(capfdbinary.readouterr().out) == {
        "stream": "S",
        "seq": 1,
        "subject": "a",
        "time": "t",
        "data_base64": "AP8=",
    }
