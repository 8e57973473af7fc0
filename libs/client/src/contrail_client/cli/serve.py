"""The server commands, and `contrail config`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from contrail_client.cli import show
from contrail_client.cli.settings import DEFAULTS, SECRET, Setting, SettingError, read_settings

FAILED = 1
MISUSED = 2

Host = Annotated[
    str | None,
    typer.Option(help="Address to bind; beyond loopback needs a token.", show_default="127.0.0.1"),
]
# Text like every other setting: contrail_serve checks them all, wherever they came from.
Port = Annotated[str | None, typer.Option(help="Port; 0 takes a free one.", show_default="7420")]
GatewayPort = Annotated[
    str | None, typer.Option(help="Port; 0 takes a free one.", show_default="7421")
]
StoragePort = Annotated[
    str | None,
    typer.Option(help="Port of probes and metrics; 0 takes a free one.", show_default="7422"),
]
LinkPort = Annotated[
    str | None,
    typer.Option(help="Port for apis and gateways; 0 takes a free one.", show_default="7430"),
]
DataDir = Annotated[
    str | None, typer.Option(help="Folder of the data.", show_default="contrail-data")
]
Storage = Annotated[
    str | None,
    typer.Option(
        help="Where the storage process listens for its link: host:port, several by commas.",
        show_default="127.0.0.1:7430",
    ),
]
Gateways = Annotated[
    str | None,
    typer.Option(
        help="Gateways to forward delivery to: host:port, several by commas.",
        show_default="127.0.0.1:7421",
    ),
]
Apis = Annotated[
    str | None,
    typer.Option(
        help="Apis to forward everything else to: host:port, several by commas.",
        show_default="127.0.0.1:7420",
    ),
]
SecretFile = Annotated[
    str | None,
    typer.Option(
        help="File with the secret that all processes share (or CONTRAIL_CLUSTER_SECRET)."
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option(
        help="File with the keys that encrypt the data, one a line, the current one first "
        "(or CONTRAIL_ENCRYPTION_KEY)."
    ),
]
MemoryMaxBytes = Annotated[
    str | None,
    typer.Option(
        help="Bytes that streams in memory may take together.",
        show_default="a quarter of the memory",
    ),
]
PublishTimeout = Annotated[
    str | None,
    typer.Option(
        help="How long a caller waits for the disk; then the outcome is unknown.",
        show_default="30s",
    ),
]
AcceptDataLoss = Annotated[
    bool | None,
    typer.Option(
        "--accept-data-loss",
        help="Open a damaged folder with what can be read of it; for one start.",
    ),
]
MaxClockJump = Annotated[
    str | None,
    typer.Option(
        help="How far the clock may be ahead of the last time known before a start asks.",
        show_default="10m",
    ),
]
TokenFile = Annotated[str | None, typer.Option(help="File with the token callers must show.")]
LogLevel = Annotated[
    str | None, typer.Option(help="debug, info, warning or error.", show_default="info")
]
Node = Annotated[str | None, typer.Option(help="The process's name, in logs and to clients.")]
AccessLog = Annotated[
    bool | None, typer.Option("--access-log/--no-access-log", help="Log each request.")
]
Config = Annotated[
    Path | None, typer.Option(envvar="CONTRAIL_CONFIG", help="TOML file with settings.")
]


class Service(StrEnum):
    """The server commands."""

    SERVE = "serve"
    STORAGE = "storage"
    API = "api"
    GATEWAY = "gateway"


def serve(
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    encryption_key_file: KeyFile = None,
    memory_max_bytes: MemoryMaxBytes = None,
    accept_data_loss: AcceptDataLoss = None,
    max_clock_jump: MaxClockJump = None,
    publish_timeout: PublishTimeout = None,
    token_file: TokenFile = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
) -> None:
    """Serve everything in one process.

    Prints one JSON line once it serves, logs to stderr, and stops cleanly on SIGTERM or Ctrl-C.
    """
    _run(
        Service.SERVE,
        config,
        host=host,
        port=port,
        data_dir=data_dir,
        encryption_key_file=encryption_key_file,
        memory_max_bytes=memory_max_bytes,
        accept_data_loss=accept_data_loss,
        max_clock_jump=max_clock_jump,
        publish_timeout=publish_timeout,
        token_file=token_file,
        node=node,
        log_level=log_level,
        access_log=access_log,
    )


def storage(
    host: Host = None,
    port: StoragePort = None,
    link_port: LinkPort = None,
    data_dir: DataDir = None,
    encryption_key_file: KeyFile = None,
    memory_max_bytes: MemoryMaxBytes = None,
    accept_data_loss: AcceptDataLoss = None,
    max_clock_jump: MaxClockJump = None,
    cluster_secret_file: SecretFile = None,
    publish_timeout: PublishTimeout = None,
    token_file: TokenFile = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
) -> None:
    """Keep the data, for apis and gateways in processes of their own.

    Apis and gateways come to the link port, and must know the cluster secret; the other port has
    /livez, /readyz and /metrics.
    """
    _run(
        Service.STORAGE,
        config,
        host=host,
        port=port,
        link_port=link_port,
        data_dir=data_dir,
        encryption_key_file=encryption_key_file,
        memory_max_bytes=memory_max_bytes,
        accept_data_loss=accept_data_loss,
        max_clock_jump=max_clock_jump,
        cluster_secret_file=cluster_secret_file,
        publish_timeout=publish_timeout,
        token_file=token_file,
        node=node,
        log_level=log_level,
        access_log=access_log,
    )


def api(
    host: Host = None,
    port: Port = None,
    storage: Storage = None,
    gateways: Gateways = None,
    cluster_secret_file: SecretFile = None,
    publish_timeout: PublishTimeout = None,
    token_file: TokenFile = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
) -> None:
    """Serve management, publishing and reads; forward delivery to a gateway."""
    _run(
        Service.API,
        config,
        host=host,
        port=port,
        storage=storage,
        gateways=gateways,
        cluster_secret_file=cluster_secret_file,
        publish_timeout=publish_timeout,
        token_file=token_file,
        node=node,
        log_level=log_level,
        access_log=access_log,
    )


def gateway(
    host: Host = None,
    port: GatewayPort = None,
    storage: Storage = None,
    apis: Apis = None,
    cluster_secret_file: SecretFile = None,
    publish_timeout: PublishTimeout = None,
    token_file: TokenFile = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
) -> None:
    """Serve delivery (pulls, acknowledgements, sockets); forward everything else to an api."""
    _run(
        Service.GATEWAY,
        config,
        host=host,
        port=port,
        storage=storage,
        apis=apis,
        cluster_secret_file=cluster_secret_file,
        publish_timeout=publish_timeout,
        token_file=token_file,
        node=node,
        log_level=log_level,
        access_log=access_log,
    )


def show_config(
    service: Annotated[Service, typer.Argument(help="Which command's.")] = Service.SERVE,
    host: Host = None,
    port: Annotated[str | None, typer.Option(help="Port of the process.")] = None,
    link_port: LinkPort = None,
    data_dir: DataDir = None,
    encryption_key_file: KeyFile = None,
    memory_max_bytes: MemoryMaxBytes = None,
    accept_data_loss: AcceptDataLoss = None,
    max_clock_jump: MaxClockJump = None,
    storage: Storage = None,
    gateways: Gateways = None,
    apis: Apis = None,
    cluster_secret_file: SecretFile = None,
    publish_timeout: PublishTimeout = None,
    token_file: TokenFile = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value a line.")] = False,
) -> None:
    """Print the effective settings of a server command, and where each came from."""
    settings = _settings(
        service,
        config,
        host=host,
        port=port,
        link_port=link_port,
        data_dir=data_dir,
        encryption_key_file=encryption_key_file,
        memory_max_bytes=memory_max_bytes,
        accept_data_loss=accept_data_loss,
        max_clock_jump=max_clock_jump,
        storage=storage,
        gateways=gateways,
        apis=apis,
        cluster_secret_file=cluster_secret_file,
        publish_timeout=publish_timeout,
        token_file=token_file,
        node=node,
        log_level=log_level,
        access_log=access_log,
    )
    rows = [(name, _shown(name, setting), setting.source) for name, setting in settings.items()]
    if as_json:
        for name, value, source in rows:
            show.json_line({"name": name, "value": value, "source": source})
    else:
        show.table(["setting", "value", "from"], rows)


def _run(service: Service, config: Path | None, **flags: Any) -> None:
    settings = _settings(service, config, **flags)
    try:
        import contrail_serve  # noqa: PLC0415 - the client commands work without the server
    except ModuleNotFoundError as error:
        if error.name != "contrail_serve":
            raise
        show.failure("the server is not installed: pip install 'contrail-client[serve]'")
        raise typer.Exit(FAILED) from error
    values = {name: setting.value for name, setting in settings.items()}
    raise typer.Exit(contrail_serve.main(values, service))


def _settings(service: Service, config: Path | None, **flags: Any) -> dict[str, Setting]:
    for name, value in flags.items():
        if value is not None and name not in DEFAULTS[service]:
            show.failure(f"contrail {service} has no --{name.replace('_', '-')}")
            raise typer.Exit(MISUSED)
    try:
        return read_settings(flags, os.environ, config, service)
    except SettingError as error:
        show.failure(str(error))
        raise typer.Exit(MISUSED) from error


def _shown(name: str, setting: Setting) -> Any:
    return "(hidden)" if name in SECRET and setting.value is not None else setting.value
