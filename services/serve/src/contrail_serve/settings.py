"""Settings of the server processes. They are checked once, with a clear message for each error."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from contrail_common.names import name_problem
from contrail_common.timeunits import NS_PER_S, parse_duration
from contrail_storage.physical_memory import CACHE_MIN, eighth_of_memory, quarter_of_memory
from contrail_storage.seal.node_keys import NodeKeyError, parse_node_keys

DEFAULT_PORT: Final = 7420
GATEWAY_PORT: Final = 7421
STORAGE_PORT: Final = 7422
LINK_PORT: Final = 7430
PEER_PORT: Final = 7431
MAX_PAYLOAD: Final = 3 << 20
SECRET_BYTES_MIN: Final = 16
_SECRETS_MAX: Final = 2
_PORT_MAX: Final = 65_535
_CLUSTER_SIZES: Final = (3, 5)
_MEMORY_BYTES_MAX: Final = 1 << 50

_COMMON: Final = frozenset(
    {
        "host",
        "port",
        "token",
        "token_file",
        "log_level",
        "log_format",
        "fast_lane",
        "node",
        "access_log",
        "allowed_hosts",
        "allowed_origins",
        "max_payload",
        "publish_timeout",
    }
)
_SECRET: Final = frozenset({"cluster_secret", "cluster_secret_file"})
_DATA: Final = frozenset(
    {
        "data_dir",
        "encryption_key",
        "encryption_key_file",
        "memory_max_bytes",
        "cache_max_bytes",
        "log_tail_bytes",
        "accept_data_loss",
        "max_clock_jump",
    }
)
_CERTIFICATES: Final = ("peer_cert", "peer_key", "peer_ca")
_CLUSTER: Final = frozenset({"peers", "peer_port", "link_port", *_CERTIFICATES})
_ANYWHERE: Final = ("0.0.0.0", "::")
_FLAGS: Final = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_LEVELS: Final = ("debug", "info", "warning", "error")

Address = tuple[str, int]


class SettingsError(Exception):
    """A setting is invalid; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of every process: its name, its HTTP address, its callers, its logs.

    ``publish_timeout_s`` is the time for which a caller waits for the disk.
    """

    node: str
    host: str
    port: int
    token: str | None
    log_level: str
    log_format: str
    access_log: bool
    fast_lane: bool
    allowed_hosts: frozenset[str]
    allowed_origins: frozenset[str]
    max_payload: int
    publish_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSettings:
    """One or two cluster secrets, the current one first, and their file if they are in one."""

    values: tuple[bytes, ...] = field(repr=False)
    file: Path | None


@dataclass(frozen=True, slots=True)
class CertificateSettings:
    """Files in PEM format: a node's certificate, its key, and the authority of all nodes."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The nodes of a cluster: the name of this one, and the peer address of each by name.

    ``host`` and ``port`` are where this node listens for the others. Without ``certificates``, the
    node makes one at its start.
    """

    name: str
    host: str
    port: int
    addresses: Mapping[str, str]
    secret: SecretSettings
    certificates: CertificateSettings | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes, in order."""
        return tuple(sorted(self.addresses))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings(ProcessSettings):
    """Settings of a process with a storage node: its data folder and encryption keys, if any.

    ``encryption_key_file`` is the file of the keys; None if they came from the environment.
    ``memory_max_bytes`` limits all streams in memory, ``cache_max_bytes`` the cache of blocks.
    ``accept_data_loss`` opens a damaged folder. ``log_tail_bytes`` of the log are kept for other
    nodes of the cluster. ``max_clock_jump_s`` limits how far the wall clock may be ahead at a
    start. ``cluster`` is None for a node that is alone.
    """

    data_dir: Path
    encryption_keys: tuple[bytes, ...] = field(repr=False)
    encryption_key_file: Path | None
    memory_max_bytes: int
    cache_max_bytes: int
    log_tail_bytes: int
    accept_data_loss: bool
    max_clock_jump_s: float
    cluster: ClusterSettings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(NodeSettings):
    """Effective settings of ``contrail serve``, the process with all services.

    ``link_port`` is for the other nodes of a cluster: each of them serves all requests, and sends
    them on to the node that answers them.
    """

    link_port: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ServeSettings":
        """Check ``values``, named like the flags, with underscores. Raises SettingsError."""
        given = _given(values, _COMMON | _SECRET | _DATA | _CLUSTER)
        cluster = None
        if _listed(given, "peers"):
            cluster = _cluster(given, _cluster_secret(given))
        else:
            # Otherwise a node that was to be one of several would form a cluster of its own.
            _check_unused(given, _SECRET | _CLUSTER)
        return cls(
            **_common(given, "n1", DEFAULT_PORT),
            **_data(given),
            link_port=_number(given, "link_port", 0, 0, _PORT_MAX),
            cluster=cluster,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings(NodeSettings):
    """Effective settings of a storage process. ``port`` is that of its probes and metrics."""

    link_port: int
    cluster_secret: SecretSettings

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "StorageSettings":
        """Check ``values``, as :meth:`ServeSettings.of` does."""
        given = _given(values, _COMMON | _SECRET | _DATA | _CLUSTER)
        secret = _cluster_secret(given)
        if not _listed(given, "peers"):
            _check_unused(given, _CLUSTER - {"link_port"})
        return cls(
            **_common(given, "n1", STORAGE_PORT),
            **_data(given),
            link_port=_number(given, "link_port", LINK_PORT, 0, _PORT_MAX),
            cluster_secret=secret,
            cluster=_cluster(given, secret),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeProcessSettings(ProcessSettings):
    """Effective settings of an api or a gateway; ``peers`` are processes of the other kind."""

    storage: tuple[Address, ...]
    peers: tuple[Address, ...]
    cluster_secret: SecretSettings

    @classmethod
    def of_api(cls, values: Mapping[str, Any]) -> "EdgeProcessSettings":
        """Check the ``values`` of an api, as :meth:`ServeSettings.of` does."""
        return cls._of(values, "api", DEFAULT_PORT, "gateways", GATEWAY_PORT)

    @classmethod
    def of_gateway(cls, values: Mapping[str, Any]) -> "EdgeProcessSettings":
        """Check the ``values`` of a gateway, as :meth:`ServeSettings.of` does."""
        return cls._of(values, "gateway", GATEWAY_PORT, "apis", DEFAULT_PORT)

    @classmethod
    def _of(
        cls, values: Mapping[str, Any], node: str, port: int, peers: str, peer_port: int
    ) -> "EdgeProcessSettings":
        given = _given(values, _COMMON | _SECRET | {"storage", peers})
        storage = _addresses(given, "storage", LINK_PORT)
        if not storage:
            raise SettingsError("storage must name at least one address")
        return cls(
            **_common(given, node, port),
            storage=storage,
            peers=_addresses(given, peers, peer_port),
            cluster_secret=_cluster_secret(given),
        )


def _given(values: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    unknown = set(values) - known
    if unknown:
        raise SettingsError(f"unknown setting: {', '.join(sorted(unknown))}")
    # A flag that was not given is None, and must not hide the default.
    return {name: value for name, value in values.items() if value is not None}


def _check_unused(given: Mapping[str, Any], names: frozenset[str]) -> None:
    """Raise SettingsError if a setting is given that only a node with ``peers`` uses."""
    unused = sorted(name for name in names & given.keys() if given[name] not in ((), ""))
    if unused:
        raise SettingsError(
            f"{unused[0]} is for a node of a cluster: also name all nodes with --peers, or omit it"
        )


def _common(given: Mapping[str, Any], default_node: str, default_port: int) -> dict[str, Any]:
    host = str(given.get("host", "127.0.0.1"))
    token = _token(given)
    loopback = is_loopback(host)
    # Everybody who reaches the address could read and delete everything.
    if not loopback and token is None:
        raise SettingsError(
            f"listening on {host} requires a token (--token-file or CONTRAIL_TOKEN); without a "
            "token the server only listens on loopback addresses"
        )
    hosts = frozenset(_listed(given, "allowed_hosts")) | {"localhost", "127.0.0.1", "::1"}
    return {
        "node": _node(given, default_node),
        "host": host,
        "port": _number(given, "port", default_port, 0, _PORT_MAX),
        "token": token,
        "log_level": _choice(given, "log_level", "info", _LEVELS),
        "log_format": _choice(given, "log_format", "auto", ("auto", "json", "text")),
        "access_log": _flag(given, "access_log", default=False),
        "fast_lane": _flag(given, "fast_lane", default=True),
        "allowed_hosts": hosts if loopback else hosts | {host},
        "allowed_origins": _origins(given),
        "max_payload": _number(given, "max_payload", 1 << 20, 1, MAX_PAYLOAD),
        "publish_timeout_s": _duration_s(given, "publish_timeout", "30s", "100ms", "1h"),
    }


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> Address:
    """Return host and port of ``host:port`` (an IPv6 host in brackets). Raises SettingsError."""
    host, separator, port = text.rpartition(":")
    host = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not (host and separator and port.isascii() and port.isdigit()):
        raise SettingsError(f"{text!r} is not an address such as 127.0.0.1:{LINK_PORT}")
    if not 0 < int(port) <= _PORT_MAX:
        raise SettingsError(f"the port of {text!r} must be between 1 and {_PORT_MAX}")
    return host, int(port)


def _addresses(given: Mapping[str, Any], name: str, default_port: int) -> tuple[Address, ...]:
    listed = _listed(given, name) if name in given else [f"127.0.0.1:{default_port}"]
    return tuple(map(parse_address, listed))


def _listed(given: Mapping[str, Any], name: str) -> list[str]:
    value = given.get(name, ())
    elements = value.split(",") if isinstance(value, str) else value
    return [one for element in elements if (one := str(element).strip())]


def _origins(given: Mapping[str, Any]) -> frozenset[str]:
    """Return origins as browsers send them: in lower case, without a path."""
    origins = [one.lower().removesuffix("/") for one in _listed(given, "allowed_origins")]
    for one in origins:
        parts = urlsplit(one)
        if not parts.scheme or not parts.hostname or one != f"{parts.scheme}://{parts.netloc}":
            raise SettingsError(f"{one!r} is not an origin such as https://app.example:8443")
    return frozenset(origins)


def _node(given: Mapping[str, Any], default: str) -> str:
    node = str(given.get("node", default))
    problem = name_problem(node)
    if problem:
        raise SettingsError(f"{node!r} is not a valid node name: {problem}")
    return node


def _data(given: Mapping[str, Any]) -> dict[str, Any]:
    file, text = _file(given, "encryption_key_file"), given.get("encryption_key")
    keys: tuple[bytes, ...] = ()
    if file is not None:
        keys = read_encryption_keys(file)
    elif text is not None:
        keys = _encryption_keys(str(text), "CONTRAIL_ENCRYPTION_KEY")
    return {
        "data_dir": _file(given, "data_dir") or Path("contrail-data"),
        "encryption_keys": keys,
        "encryption_key_file": file,
        "memory_max_bytes": _number(
            given, "memory_max_bytes", quarter_of_memory(), 0, _MEMORY_BYTES_MAX
        ),
        "cache_max_bytes": _number(
            given, "cache_max_bytes", eighth_of_memory(), CACHE_MIN, _MEMORY_BYTES_MAX
        ),
        "log_tail_bytes": _number(given, "log_tail_bytes", 1 << 30, 1 << 20, _MEMORY_BYTES_MAX),
        "max_clock_jump_s": _duration_s(given, "max_clock_jump", "10m", "1s", "36500d"),
        "accept_data_loss": _flag(given, "accept_data_loss", default=False),
    }


def read_encryption_keys(path: Path) -> tuple[bytes, ...]:
    """Return the keys in a file, the current one first. Raises SettingsError."""
    return _encryption_keys(_read(path, "encryption key file"), str(path))


def _encryption_keys(text: str, source: str) -> tuple[bytes, ...]:
    try:
        return parse_node_keys(text)
    except NodeKeyError as error:
        raise SettingsError(f"{source}: {error}") from error


def _token(given: Mapping[str, Any]) -> str | None:
    path = _file(given, "token_file")
    token = given.get("token") if path is None else _read(path, "token file")
    # Such a token could not be sent in an Authorization header.
    if token is not None and (not token or not str(token).isascii() or " " in str(token)):
        raise SettingsError("a token must be a non-empty line of ASCII without spaces")
    return None if token is None else str(token)


def _cluster(given: Mapping[str, Any], secret: SecretSettings) -> ClusterSettings | None:
    addresses: dict[str, str] = {}
    for one in _listed(given, "peers"):
        name, separator, address = one.partition("=")
        if not separator:
            raise SettingsError(f"{one!r} is not a peer such as n1=127.0.0.1:{PEER_PORT}")
        if name in addresses:
            raise SettingsError(f"peers names {name} twice")
        host, port = parse_address(address)
        addresses[_node({"node": name}, "")] = f"[{host}]:{port}" if ":" in host else address
    if not addresses:
        return None
    if len(addresses) not in _CLUSTER_SIZES:
        raise SettingsError(
            f"peers must name 3 or 5 nodes, this one included, not {len(addresses)}"
        )
    name = _node(given, "n1")
    if name not in addresses:
        raise SettingsError(f"peers must name this node too, and {name} (--node) is not in it")
    host, port = parse_address(addresses[name])
    bound = str(given.get("host", ""))
    return ClusterSettings(
        name=name,
        # In a container, the address that the others know may be none of its own.
        host=bound if bound in _ANYWHERE else host,
        port=_number(given, "peer_port", port, 1, _PORT_MAX),
        addresses=addresses,
        secret=secret,
        certificates=_certificates(given),
    )


def _certificates(given: Mapping[str, Any]) -> CertificateSettings | None:
    files = {name: _file(given, name) for name in _CERTIFICATES}
    if not any(files.values()):
        return None
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise SettingsError(f"{' and '.join(_CERTIFICATES)} go together; {missing[0]} is missing")
    return CertificateSettings(*(file for file in files.values() if file is not None))


def _cluster_secret(given: Mapping[str, Any]) -> SecretSettings:
    path = _file(given, "cluster_secret_file")
    if path is not None:
        return SecretSettings(values=read_cluster_secrets(path), file=path)
    secret = given.get("cluster_secret")
    if secret is None:
        raise SettingsError(
            "a cluster secret is required (--cluster-secret-file or CONTRAIL_CLUSTER_SECRET); "
            "all processes of a cluster must have the same one"
        )
    return SecretSettings(values=_cluster_secrets(str(secret), "the cluster secret"), file=None)


def read_cluster_secrets(path: Path) -> tuple[bytes, ...]:
    """Return the one or two secrets in a file, the current one first. Raises SettingsError."""
    return _cluster_secrets(_read(path, "cluster secret file"), f"the cluster secret in {path}")


def _cluster_secrets(text: str, source: str) -> tuple[bytes, ...]:
    secrets = tuple(line.strip().encode() for line in text.splitlines() if line.strip())
    if not all(len(one) >= SECRET_BYTES_MIN for one in secrets or [b""]):
        raise SettingsError(f"{source} must have at least {SECRET_BYTES_MIN} bytes")
    if len(secrets) > _SECRETS_MAX:
        raise SettingsError(
            f"{source} has {len(secrets)} lines: at most {_SECRETS_MAX} are valid at once, "
            "the current one first"
        )
    return secrets


def _file(given: Mapping[str, Any], name: str) -> Path | None:
    """Return the path in a setting. An empty text is refused: it would be the current folder."""
    path = given.get(name)
    if path is None:
        return None
    if not str(path).strip():
        raise SettingsError(f"{name} is empty: give a path, or omit the setting")
    return Path(path)


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except IsADirectoryError as error:
        raise SettingsError(f"the {what} cannot be read: {path} is a folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the {what} cannot be read: {error}") from error


def _number(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise SettingsError(f"{name} must be a whole number, not {value!r}") from None
    if not low <= number <= high:
        raise SettingsError(f"{name} must be between {low} and {high}, not {number}")
    return number


def _duration_s(given: Mapping[str, Any], name: str, default: str, low: str, high: str) -> float:
    """Return a duration such as ``30s`` in seconds."""
    value = given.get(name, default)
    try:
        duration_ns = parse_duration(value if isinstance(value, str) else "")
    except ValueError:
        raise SettingsError(f"{name} must be a duration such as {default}, not {value!r}") from None
    if not parse_duration(low) <= duration_ns <= parse_duration(high):
        raise SettingsError(f"{name} must be between {low} and {high}, not {value}")
    return duration_ns / NS_PER_S


def _flag(given: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = str(given.get(name, default)).lower()
    if value not in _FLAGS:
        raise SettingsError(f"{name} must be true or false, not {value}")
    return _FLAGS[value]


def _choice(given: Mapping[str, Any], name: str, default: str, choices: tuple[str, ...]) -> str:
    value = str(given.get(name, default)).lower()
    if value not in choices:
        raise SettingsError(f"{name} must be one of {', '.join(choices)}, not {value}")
    return value
