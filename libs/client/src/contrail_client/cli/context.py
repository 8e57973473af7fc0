"""The server that client commands use, from flags, the environment, a TOML file or a context.

The file may be the server's own: the client reads its table `[client]`, the server the rest.

    [client]
    url = "http://127.0.0.1:7420"
    token_file = "contrail.token"
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contrail_client.cli import saved
from contrail_client.cli.settings import did_you_mean
from contrail_client.transport import DEFAULT_URL

TABLE: Final = "client"
_KEYS: Final = ("url", "token", "token_file")


@dataclass(frozen=True, slots=True)
class Context:
    """A server's address, and the token to show it."""

    url: str
    token: str | None


def read_context(
    url: str | None, token_file: Path | None, config: Path | None, environ: Mapping[str, str]
) -> Context:
    """Return the effective context; raise ValueError if a file cannot be used.

    Flags take precedence over `CONTRAIL_URL` and `CONTRAIL_TOKEN`, these over the file, and the
    file over the context in use. The token of a context is only sent to the server of that context.
    """
    table = _read_table(config)
    token = _token(token_file, environ, table, config)
    address = url or environ.get("CONTRAIL_URL") or table.get("url")
    # An address that was given for this command must never get the token of another server.
    context = None if address else saved.in_use(environ)
    if context is None:
        return Context(address or DEFAULT_URL, token)
    # A token that was given for this command goes before one that was saved.
    if token is None and context.token_file:
        token = _read_token(Path(context.token_file))
    return Context(context.url, token)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file; raise ValueError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _token(
    file: Path | None,
    environ: Mapping[str, str],
    table: Mapping[str, str],
    config: Path | None,
) -> str | None:
    if file is None:
        if token := environ.get("CONTRAIL_TOKEN") or table.get("token"):
            return token
        if config is None or "token_file" not in table:
            return None
        # Relative to the file, so that it does not matter where the command is run.
        file = config.parent / table["token_file"]
    return _read_token(file)


def _read_token(file: Path) -> str:
    try:
        token = read_file(file).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: a token must be ASCII") from error
    if not token:
        raise ValueError(f"{file}: the file contains no token")
    return token


def _read_table(config: Path | None) -> Mapping[str, str]:
    if config is None:
        return {}
    try:
        whole: dict[str, Any] = tomllib.loads(read_file(config).decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{config}: {error}") from error
    table = whole.get(TABLE, {})
    if not isinstance(table, dict):
        raise ValueError(f"{config}: [{TABLE}] must be a table")
    for name, value in table.items():
        if name not in _KEYS:
            near = did_you_mean(name, _KEYS) or f", only {', '.join(_KEYS)}"
            raise ValueError(f"{config}: [{TABLE}] has no {name!r}{near}")
        if not isinstance(value, str):
            raise ValueError(f"{config}: {name} must be a string")
    return table
