"""What the flights job says when the server that is to run already cannot be used."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_flights.__main__ import parse_settings
from contrail_flights.server import ServerError, connected
from contrail_spark.session import MasterError, parse_master
from tests.support.each import each
from tests.support.ports import free_port
from tests.support.servers import ServerProcess

TOKEN = "the-token-of-a-test"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that answers to the token alone."""
    folder = tmp_path_factory.mktemp("guarded")
    with ServerProcess(folder / "data", token=TOKEN) as running:
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token.txt"
    file.write_text(f"{TOKEN}\n")
    return file


def test_missing_token_for_a_server_is_a_clear_error(guarded: ServerProcess) -> None:
    with pytest.raises(ServerError, match="requires a token: use --token-file"):
        connected(guarded.url, None).__enter__()


def test_a_token_that_is_refused_is_named_by_its_file(
    guarded: ServerProcess, token_file: Path
) -> None:
    token_file.write_text("another")
    with pytest.raises(ServerError, match=f"refuses the token in {token_file}"):
        connected(guarded.url, token_file).__enter__()


def test_a_token_file_that_is_missing_is_named(guarded: ServerProcess, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"the token file cannot be read: .*/none"):
        connected(guarded.url, tmp_path / "none").__enter__()


def test_an_address_where_no_server_answers_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerError, match=f"no server answers at {url}"):
        connected(url, None).__enter__()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--url", "http://127.0.0.1:1", "--port", "7420"], "cannot be used with --url"),
        (["--url", "http://127.0.0.1:1", "--data-dir", "x"], "cannot be used with --url"),
        (["--token-file", "x"], "--token-file requires --url"),
        (["--url", "127.0.0.1:7420"], "an http:// or https:// origin"),
        (["--spark-master", "yarn"], "'yarn' is not a master URL such as spark://"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_settings(arguments)
    assert told in capsys.readouterr().err


@each("text", ["local[2]", "spark://host", "spark://:7077", "spark://a:b", "spark://u@h:1", ""])
def test_what_is_no_standalone_master_is_refused(text: str) -> None:
    with pytest.raises(MasterError, match="is not a master URL such as"):
        parse_master(text)


def test_a_master_by_name_or_address_is_understood() -> None:
    assert parse_master("spark://spark-master:7077") == ("spark-master", 7077)
    assert parse_master("spark://[::1]:7077") == ("::1", 7077)
