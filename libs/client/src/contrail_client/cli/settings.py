"""Settings of the server: flags, then `CONTRAIL_*` variables, then a TOML file, then defaults.

Here they are only gathered; `contrail_serve` checks them.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

ENVIRONMENT_PREFIX: Final = "CONTRAIL_"


class Service(StrEnum):
    """The server commands."""

    SERVE = "serve"
    STORAGE = "storage"
    API = "api"
    GATEWAY = "gateway"


_ALL: Final = tuple(Service)
_EDGE: Final = (Service.SERVE, Service.API, Service.GATEWAY)
_DATA: Final = (Service.SERVE, Service.STORAGE)
_LINKED: Final = (Service.API, Service.GATEWAY)


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting of the server, with all that commands, files and help say about it.

    Its variable is `CONTRAIL_` and the name in capitals. A setting without `help` has no flag;
    `shown` is its default in help, where that is not the default itself.
    """

    name: str
    services: tuple[Service, ...]
    default: Any = None
    metavar: str = ""
    help: str = ""
    shown: str | None = None
    secret: bool = False
    negatable: bool = False
    """Whether a switch can also be turned off by its flag."""

    @property
    def is_list(self) -> bool:
        """Whether its text is several, separated by commas."""
        return isinstance(self.default, tuple)

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, so that its flag takes no value."""
        return isinstance(self.default, bool)

    @property
    def shown_default(self) -> str:
        """The default as help shows it; empty for none."""
        if self.shown is not None:
            return self.shown
        if self.default is None or self.is_switch:
            return ""
        return ",".join(self.default) if self.is_list else str(self.default)


_PORT: Final = "Port to listen on; 0 picks a free port."
_NODE: Final = "Name of the process, shown in logs and to clients."

DECLARED: Final = (
    Declared(
        "host", _ALL, "127.0.0.1", "HOST", "Address to bind. Other than loopback requires a token."
    ),
    Declared("port", (Service.SERVE, Service.API), 7420, "PORT", _PORT),
    Declared("port", (Service.GATEWAY,), 7421, "PORT", _PORT),
    Declared(
        "port",
        (Service.STORAGE,),
        7422,
        "PORT",
        "Port for probes and metrics; 0 picks a free port.",
    ),
    Declared(
        "link_port",
        (Service.STORAGE,),
        7430,
        "PORT",
        "Port for api and gateway processes; 0 picks a free port.",
    ),
    Declared(
        "link_port",
        (Service.SERVE,),
        None,
        "PORT",
        "Port for requests from the other nodes of a cluster.",
        shown="any free port",
    ),
    Declared(
        "peers",
        _DATA,
        (),
        "NAME=HOST:PORT,...",
        "Names and peer addresses of all 3 or 5 nodes of the cluster, this one included. Without "
        "it, the node is alone.",
    ),
    Declared(
        "peer_port",
        _DATA,
        None,
        "PORT",
        "Port for the other nodes.",
        shown="as in --peers",
    ),
    *(
        Declared(name, _DATA, None, "FILE", f"File with {what}, for connections between nodes.")
        for name, what in (
            ("peer_cert", "the certificate of this node (PEM); it must have the name of the node"),
            ("peer_key", "the key of the certificate (PEM)"),
            ("peer_ca", "the authority that has signed the certificates of all nodes (PEM)"),
        )
    ),
    Declared("data_dir", _DATA, "contrail-data", "FOLDER", "Folder for the data."),
    Declared("encryption_key", _DATA, secret=True),
    Declared(
        "encryption_key_file",
        _DATA,
        None,
        "FILE",
        "File that contains the encryption keys for stored data, one per line, the current key "
        "first (or use CONTRAIL_ENCRYPTION_KEY).",
    ),
    Declared(
        "memory_max_bytes",
        _DATA,
        None,
        "BYTES",
        "Maximum total size of all streams in memory, in bytes.",
        shown="a quarter of the machine's memory",
    ),
    Declared(
        "cache_max_bytes",
        _DATA,
        None,
        "BYTES",
        "Maximum size of the cache of stored messages, in bytes.",
        shown="an eighth of the machine's memory up to 512 MiB",
    ),
    Declared(
        "log_tail_bytes",
        _DATA,
        1 << 30,
        "BYTES",
        "Bytes of the log that a node keeps for other nodes of its cluster that were away.",
    ),
    Declared(
        "accept_data_loss",
        _DATA,
        False,
        "",
        "Open a damaged data folder and keep only what can be read. For a single start.",
    ),
    Declared(
        "max_clock_jump",
        _DATA,
        "10m",
        "DURATION",
        "At startup, delay writes if the system clock is ahead of the last recorded time by more "
        "than this.",
    ),
    Declared(
        "storage",
        _LINKED,
        ("127.0.0.1:7430",),
        "HOST:PORT,...",
        "Link addresses of all storage nodes of the cluster, separated by commas.",
    ),
    Declared(
        "gateways",
        (Service.API,),
        ("127.0.0.1:7421",),
        "HOST:PORT,...",
        "Gateway processes to forward delivery requests to, separated by commas.",
    ),
    Declared(
        "apis",
        (Service.GATEWAY,),
        ("127.0.0.1:7420",),
        "HOST:PORT,...",
        "Api processes to forward all other requests to, separated by commas.",
    ),
    Declared("cluster_secret", _ALL, secret=True),
    Declared(
        "cluster_secret_file",
        _ALL,
        None,
        "FILE",
        "File that contains the secret shared by all processes (or use CONTRAIL_CLUSTER_SECRET). "
        "While it is being changed, a second line may hold the other one.",
    ),
    Declared(
        "publish_timeout",
        _ALL,
        "30s",
        "DURATION",
        "How long a publish may wait for the disk before its outcome is reported as unknown.",
    ),
    Declared("max_payload", _ALL, 1 << 20),
    Declared("token", _ALL, secret=True),
    Declared(
        "token_file", _ALL, None, "FILE", "File that contains the token required from clients."
    ),
    Declared("allowed_hosts", _ALL, ()),
    Declared(
        "allowed_origins",
        _EDGE,
        (),
        "ORIGINS",
        "Origins whose web pages may use the API (CORS), separated by commas.",
    ),
    Declared("allowed_origins", (Service.STORAGE,), ()),  # no page has use for its probes
    Declared("node", _DATA, "n1", "NAME", _NODE, shown=""),
    Declared("node", (Service.API,), "api", "NAME", _NODE, shown=""),
    Declared("node", (Service.GATEWAY,), "gateway", "NAME", _NODE, shown=""),
    Declared("log_level", _ALL, "info", "LEVEL", "Log level: debug, info, warning or error."),
    Declared("log_format", _ALL, "auto"),
    Declared("access_log", _ALL, False, "", "Log every request.", negatable=True),
)
"""Every setting, in the order of help. Secrets have no flag: all processes could see it."""

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    service: {each.name: each.default for each in DECLARED if service in each.services}
    for service in Service
}
"""Every setting of each server command."""

FLAGS: Final[Mapping[str, frozenset[str]]] = {
    service: frozenset(each.name for each in DECLARED if service in each.services and each.help)
    for service in Service
}
"""The settings of each server command that have a flag."""

KNOWN: Final = frozenset(each.name for each in DECLARED)
LISTS: Final = frozenset(each.name for each in DECLARED if each.is_list)
SECRET: Final = frozenset(each.name for each in DECLARED if each.secret)

CLIENT: Final = "client"
"""A table of the same file, for the client commands."""


_OTHERS: Final = frozenset({"url", "token", "config", "context"})
"""Variables of the client commands."""


class SettingError(ValueError):
    """A settings file that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value and, for people, where it came from."""

    value: Any
    source: str


def read_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config: Path | None,
    service: str = "serve",
) -> dict[str, Setting]:
    """The effective settings of `service` by name; `flags` holds None for what was not given.

    A file may hold settings of other services, too, so that all share one. Raises SettingError for
    a file that cannot be read or names a setting that no service has.
    """
    table = _read_table(config)
    return {
        name: _first_given(name, default, flags, environ, table, str(config))
        for name, default in DEFAULTS[service].items()
    }


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of ours and is none."""
    known = {name.upper() for name in KNOWN | _OTHERS}
    ours = (each for each in sorted(environ) if each.startswith(ENVIRONMENT_PREFIX))
    rest = (each.removeprefix(ENVIRONMENT_PREFIX) for each in ours)
    return [
        f"{ENVIRONMENT_PREFIX}{name} is set, but is not a known setting"
        + did_you_mean(name, known, ENVIRONMENT_PREFIX)
        for name in rest
        if name not in known
    ]


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`, did you mean X?` for the nearest of the known names; empty when none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {prefix}{near[0]}?" if near else ""


def _first_given(
    name: str,
    default: Any,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    table: Mapping[str, Any],
    file: str,
) -> Setting:
    variable = ENVIRONMENT_PREFIX + name.upper()
    if flags.get(name) is not None:
        return Setting(_elements(flags[name]) if name in LISTS else flags[name], "flag")
    if variable in environ:
        text = environ[variable]
        return Setting(_elements(text) if name in LISTS else text, variable)
    if name in table:
        return Setting(table[name], file)
    return Setting(default, "default")


def _elements(text: str) -> tuple[str, ...]:
    return tuple(element.strip() for element in text.split(",") if element.strip())


def _read_table(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{config}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"{config}: {error}") from error
    # The server and the client commands may share a file.
    table.pop(CLIENT, None)
    unknown = sorted(set(table) - KNOWN)
    if unknown:
        near = did_you_mean(unknown[0], KNOWN)
        listed = near or f"; settings are {', '.join(sorted(KNOWN))}"
        raise SettingError(f"{config}: unknown setting {unknown[0]!r}{listed}")
    return table
