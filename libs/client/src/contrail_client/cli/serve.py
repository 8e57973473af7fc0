"""`contrail serve` and `contrail config`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from contrail_client.cli import show
from contrail_client.cli.settings import SECRET, Setting, SettingError, read_settings

FAILED = 1
MISUSED = 2

Host = Annotated[
    str | None,
    typer.Option(help="Address to bind; beyond loopback needs a token.", show_default="127.0.0.1"),
]
# Text like every other setting: contrail_serve checks them all, wherever they came from.
Port = Annotated[str | None, typer.Option(help="Port; 0 takes a free one.", show_default="7420")]
DataDir = Annotated[
    str | None, typer.Option(help="Folder of the data.", show_default="contrail-data")
]
TokenFile = Annotated[str | None, typer.Option(help="File with the token callers must show.")]
LogLevel = Annotated[
    str | None, typer.Option(help="debug, info, warning or error.", show_default="info")
]
Config = Annotated[
    Path | None, typer.Option(envvar="CONTRAIL_CONFIG", help="TOML file with settings.")
]


def serve(
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    token_file: TokenFile = None,
    log_level: LogLevel = None,
    config: Config = None,
) -> None:
    """Serve everything in one process.

    Prints one JSON line once it serves, logs to stderr, and stops cleanly on SIGTERM or Ctrl-C.
    """
    settings = _settings(
        config,
        host=host,
        port=port,
        data_dir=data_dir,
        token_file=token_file,
        log_level=log_level,
    )
    try:
        import contrail_serve  # noqa: PLC0415 - the client commands work without the server
    except ModuleNotFoundError as error:
        if error.name != "contrail_serve":
            raise
        show.failure("the server is not installed: pip install 'contrail-client[serve]'")
        raise typer.Exit(FAILED) from error
    raise typer.Exit(
        contrail_serve.main({name: setting.value for name, setting in settings.items()})
    )


def show_config(
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    token_file: TokenFile = None,
    log_level: LogLevel = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value a line.")] = False,
) -> None:
    """Print the effective settings of `contrail serve`, and where each came from."""
    settings = _settings(
        config,
        host=host,
        port=port,
        data_dir=data_dir,
        token_file=token_file,
        log_level=log_level,
    )
    rows = [(name, _shown(name, setting), setting.source) for name, setting in settings.items()]
    if as_json:
        for name, value, source in rows:
            show.json_line({"name": name, "value": value, "source": source})
    else:
        show.table(["setting", "value", "from"], rows)


def _settings(config: Path | None, **flags: Any) -> dict[str, Setting]:
    try:
        return read_settings(flags, os.environ, config)
    except SettingError as error:
        show.failure(str(error))
        raise typer.Exit(MISUSED) from error


def _shown(name: str, setting: Setting) -> Any:
    return "(hidden)" if name in SECRET and setting.value is not None else setting.value
