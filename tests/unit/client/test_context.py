"""Which server the client commands talk to: which source wins, and what cannot be used."""

from pathlib import Path

import pytest

from contrail_client.cli.arguments import fields_of, headers_of
from contrail_client.cli.commands.bench import figures, percentile
from contrail_client.cli.context import Context, read_context
from contrail_client.cli.saved import Saved, save
from contrail_client.cli.settings import read_settings
from contrail_client.transport import DEFAULT_URL
from tests.support.each import each


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "contrail.toml"
    path.write_text('port = 1\n[client]\nurl = "http://file"\ntoken_file = "the.token"\n')
    (tmp_path / "the.token").write_text("of the file\n")
    return path


def test_nothing_given_is_the_local_server_without_a_token() -> None:
    assert read_context(None, None, None, {}) == Context(DEFAULT_URL, None)


def test_flag_overrides_environment_overrides_file(config: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag.token"
    flag.write_text("of the flag")
    environ = {"CONTRAIL_URL": "http://environ", "CONTRAIL_TOKEN": "of the environ"}
    assert read_context("http://flag", flag, config, environ) == Context(
        "http://flag", "of the flag"
    )
    assert read_context(None, None, config, environ) == Context("http://environ", "of the environ")
    assert read_context(None, None, config, {}) == Context("http://file", "of the file")


def test_given_token_overrides_that_of_a_context(config: Path, tmp_path: Path) -> None:
    token_file = tmp_path / "context.token"
    token_file.write_text("of the context")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "CONTRAIL_CONTEXT": "there"}
    save(environ, "there", Saved("http://there", str(token_file)))
    assert read_context(None, None, None, environ) == Context("http://there", "of the context")
    named = tmp_path / "flag.token"
    named.write_text("of the flag")
    assert read_context(None, named, None, environ).token == "of the flag"
    config.write_text('[client]\ntoken = "of the file"\n')
    assert read_context(None, None, config, environ).token == "of the file"
    environ["CONTRAIL_TOKEN"] = "of the environ"
    assert read_context(None, None, config, environ).token == "of the environ"
    del environ["CONTRAIL_TOKEN"]
    # The token of a context is only for its own server.
    assert read_context("http://other", None, None, environ) == Context("http://other", None)


def test_server_and_clients_may_share_a_file(config: Path) -> None:
    assert read_settings({}, {}, config)["port"].value == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[client", "contrail.toml"),
        ("[client]\nurll = 'x'", "urll"),
        ("[client]\nurl = 7", "url must be a string"),
        ("client = 1", "must be a table"),
        ("[client]\ntoken_file = 'missing'", "missing"),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "contrail.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_context(None, None, path, {})


def test_token_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="ASCII"):
        read_context(None, path, None, {})


def test_fields_come_from_file_then_assignments_then_options(tmp_path: Path) -> None:
    path = tmp_path / "fields.json"
    path.write_text('{"a": 1, "b": 1, "c": 1}')
    found = fields_of(path, ["b=2", "c=2", 'd={"x": [true]}', "e=7d", "f=null"], c=3, g=None)
    assert found == {"a": 1, "b": 2, "c": 3, "d": {"x": [True]}, "e": "7d", "f": None}


@each("text", ["", "=", "a", "=b"])
def test_pair_without_a_name_or_an_equals_sign_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=VALUE"):
        headers_of([text])
    with pytest.raises(ValueError, match="NAME=VALUE"):
        fields_of(None, [text])


def test_header_may_have_several_values() -> None:
    assert headers_of(["A=1", "B=", "A=x=y"]) == {"A": ["1", "x=y"], "B": [""]}


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (0, 1, 50, 99, 100)] == [1.0, 1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None


def test_figures_are_rates_and_milliseconds() -> None:
    found = figures("x", 1_000, 500, 2.0, [0.004, 0.001, 0.002])
    assert (found.messages_per_second, found.megabytes_per_second) == (500.0, 0.25)
    assert (found.p50_ms, found.p99_ms, found.max_ms) == (2.0, 4.0, 4.0)
    assert figures("x", 1, 1, 1.0, []).max_ms is None
