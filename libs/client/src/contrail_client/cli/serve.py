"""The server commands, and `contrail config`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from contrail_client.cli import show
from contrail_client.cli.ending import Failed, Misuse
from contrail_client.cli.settings import DEFAULTS, SECRET, Setting, read_settings

Host = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="Address to bind. Other than loopback requires a token.",
        show_default="127.0.0.1",
    ),
]
# Text like every other setting: contrail_serve checks them all, wherever they came from.
Port = Annotated[
    str | None,
    typer.Option(
        metavar="PORT", help="Port to listen on; 0 picks a free port.", show_default="7420"
    ),
]
GatewayPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT", help="Port to listen on; 0 picks a free port.", show_default="7421"
    ),
]
StoragePort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="Port for probes and metrics; 0 picks a free port.",
        show_default="7422",
    ),
]
LinkPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="Port for api and gateway processes; 0 picks a free port.",
        show_default="7430",
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Folder for the data.", show_default="contrail-data"),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,...",
        help="Link addresses of storage processes, separated by commas.",
        show_default="127.0.0.1:7430",
    ),
]
Gateways = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,...",
        help="Gateway processes to forward delivery requests to, separated by commas.",
        show_default="127.0.0.1:7421",
    ),
]
Apis = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,...",
        help="Api processes to forward all other requests to, separated by commas.",
        show_default="127.0.0.1:7420",
    ),
]
SecretFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="File that contains the secret shared by all processes (or use "
        "CONTRAIL_CLUSTER_SECRET).",
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="File that contains the encryption keys for stored data, one per line, the "
        "current key first (or use CONTRAIL_ENCRYPTION_KEY).",
    ),
]
MemoryMaxBytes = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Maximum total size of all streams in memory, in bytes.",
        show_default="a quarter of the machine's memory",
    ),
]
PublishTimeout = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="How long a publish may wait for the disk before its outcome is reported as unknown.",
        show_default="30s",
    ),
]
AcceptDataLoss = Annotated[
    bool | None,
    typer.Option(
        "--accept-data-loss",
        help="Open a damaged data folder and keep only what can be read. For a single start.",
    ),
]
MaxClockJump = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="At startup, delay writes if the system clock is ahead of the last recorded time "
        "by more than this.",
        show_default="10m",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File that contains the token required from clients."),
]
AllowedOrigins = Annotated[
    str | None,
    typer.Option(
        metavar="ORIGINS",
        help="Origins whose web pages may use the API (CORS), separated by commas.",
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL", help="Log level: debug, info, warning or error.", show_default="info"
    ),
]
Node = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the process, shown in logs and to clients."),
]
AccessLog = Annotated[
    bool | None, typer.Option("--access-log/--no-access-log", help="Log every request.")
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
    allowed_origins: AllowedOrigins = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
) -> None:
    """Run the whole server in one process.

    Prints one line of JSON once it is ready, logs to stderr, and stops cleanly on SIGTERM or
    Ctrl-C.
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
        allowed_origins=allowed_origins,
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
    """Run only storage, for api and gateway processes.

    Api and gateway processes connect to the link port and must have the same cluster secret. The
    other port serves /livez, /readyz and /metrics.
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
    allowed_origins: AllowedOrigins = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
) -> None:
    """Run only the api: management, publishing and reads. Forwards delivery to a gateway."""
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
        allowed_origins=allowed_origins,
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
    allowed_origins: AllowedOrigins = None,
    node: Node = None,
    log_level: LogLevel = None,
    access_log: AccessLog = None,
    config: Config = None,
) -> None:
    """Run only the gateway: pulls, acks and WebSockets. Forwards everything else to an api."""
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
        allowed_origins=allowed_origins,
        node=node,
        log_level=log_level,
        access_log=access_log,
    )


def show_config(
    service: Annotated[
        Service, typer.Argument(help="Server command whose settings to print.")
    ] = Service.SERVE,
    host: Host = None,
    port: Annotated[str | None, typer.Option(metavar="PORT", help="Port of the process.")] = None,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one value per line.")
    ] = False,
) -> None:
    """Print the effective settings of a server command, and the source of each."""
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
        told = (
            (name, str(value) if type(value) is int else value, source)
            for name, value, source in rows
        )
        show.table(["setting", "value", "from"], told)


def _run(service: Service, config: Path | None, **flags: Any) -> None:
    settings = _settings(service, config, **flags)
    try:
        import contrail_serve  # noqa: PLC0415 - the client commands work without the server
    except ModuleNotFoundError as error:
        if error.name != "contrail_serve":
            raise
        raise Failed(
            "the server is not installed; install it with: pip install 'contrail-client[serve]'"
        ) from error
    values = {name: setting.value for name, setting in settings.items()}
    raise typer.Exit(contrail_serve.main(values, service))


def _settings(service: Service, config: Path | None, **flags: Any) -> dict[str, Setting]:
    for name, value in flags.items():
        if value is not None and name not in DEFAULTS[service]:
            raise Misuse(f"contrail {service} has no --{name.replace('_', '-')}")
    return read_settings(flags, os.environ, config, service)


def _shown(name: str, setting: Setting) -> Any:
    return "(hidden)" if name in SECRET and setting.value is not None else setting.value
