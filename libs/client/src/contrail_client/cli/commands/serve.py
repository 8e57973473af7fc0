"""The server commands, and `contrail config`."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from contrail_client.cli import show
from contrail_client.cli.ending import Failed, Misuse
from contrail_client.cli.settings import (
    DECLARED,
    FLAGS,
    SECRET,
    Declared,
    Service,
    Setting,
    read_settings,
)

Config = Annotated[
    Path | None, typer.Option(envvar="CONTRAIL_CONFIG", help="TOML file with settings.")
]
F = TypeVar("F", bound=Callable[..., None])


def _option(setting: Declared) -> Any:
    """The type of a setting's flag. Its value stays text: the server checks all settings."""
    if setting.is_switch:
        flag = "--" + setting.name.replace("_", "-")
        forms = f"{flag}/{flag.replace('--', '--no-', 1)}" if setting.negatable else flag
        return Annotated[bool | None, typer.Option(forms, help=setting.help)]
    option = typer.Option(
        metavar=setting.metavar,
        help=setting.help,
        show_default=setting.shown_default or True,
    )
    return Annotated[str | None, option]


def _flags_of(service: Service | None, **instead: Any) -> Callable[[F], F]:
    """Give a command, in place of its `**flags`, the flags of a service's settings, or of all.

    `instead` has the types of flags that are not as they are declared.
    """
    options = {
        each.name: _option(each)
        for each in DECLARED
        if each.help and (service is None or service in each.services)
    }
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in (options | instead).items()
    ]

    def give(command: F) -> F:
        # Typer makes an option of each parameter in the signature, and none of `**flags`.
        own = [*inspect.signature(command).parameters.values()][:-1]
        first = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        parameters = [*first, *flags, *own[len(first) :]]
        shown: Any = command
        shown.__signature__ = inspect.Signature(parameters, return_annotation=None)
        shown.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return give


@_flags_of(Service.SERVE)
def serve(*, config: Config = None, **flags: Any) -> None:
    """Run the whole server in one process.

    Prints one line of JSON once it is ready, logs to stderr, and stops cleanly on SIGTERM or
    Ctrl-C.
    """
    _run(Service.SERVE, config, flags)


@_flags_of(Service.STORAGE)
def storage(*, config: Config = None, **flags: Any) -> None:
    """Run only storage, for api and gateway processes.

    Api and gateway processes connect to the link port and must have the same cluster secret. The
    other port serves /livez, /readyz and /metrics.
    """
    _run(Service.STORAGE, config, flags)


@_flags_of(Service.API)
def api(*, config: Config = None, **flags: Any) -> None:
    """Run only the api: management, publishing and reads. Forwards delivery to a gateway."""
    _run(Service.API, config, flags)


@_flags_of(Service.GATEWAY)
def gateway(*, config: Config = None, **flags: Any) -> None:
    """Run only the gateway: pulls, acks and WebSockets. Forwards everything else to an api."""
    _run(Service.GATEWAY, config, flags)


# Each service has a port of its own, so this flag shows no default.
@_flags_of(
    None, port=Annotated[str | None, typer.Option(metavar="PORT", help="Port of the process.")]
)
def show_config(
    service: Annotated[
        Service, typer.Argument(help="Server command whose settings to print.")
    ] = Service.SERVE,
    *,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one value per line.")
    ] = False,
    **flags: Any,
) -> None:
    """Print the effective settings of a server command, and the source of each."""
    settings = _settings(service, config, flags)
    rows = [(name, _shown(name, setting), setting.source) for name, setting in settings.items()]
    if as_json:
        for name, value, source in rows:
            show.json_line({"name": name, "value": value, "source": source})
    else:
        cells = (
            (name, str(value) if type(value) is int else value, source)
            for name, value, source in rows
        )
        show.table(["setting", "value", "from"], cells)


def _run(service: Service, config: Path | None, flags: Mapping[str, Any]) -> None:
    settings = _settings(service, config, flags)
    values = {name: setting.value for name, setting in settings.items()}
    raise typer.Exit(server().main(values, service))


def server() -> Any:
    """The module `contrail_serve`. Raises Failed if it is not installed."""
    try:
        import contrail_serve  # noqa: PLC0415 - the client commands work without the server
    except ModuleNotFoundError as error:
        if error.name != "contrail_serve":
            raise
        raise Failed(
            "the server is not installed; install it with: pip install 'contrail-client[serve]'"
        ) from error
    return contrail_serve


def _settings(
    service: Service, config: Path | None, flags: Mapping[str, Any]
) -> dict[str, Setting]:
    for name, value in flags.items():
        if value is not None and name not in FLAGS[service]:
            raise Misuse(f"contrail {service} has no --{name.replace('_', '-')}")
    return read_settings(flags, os.environ, config, service)


def _shown(name: str, setting: Setting) -> Any:
    return "(hidden)" if name in SECRET and setting.value is not None else setting.value
