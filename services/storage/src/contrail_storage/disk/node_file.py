"""Small files that are replaced as a whole: a power cut leaves the old content or the new."""

import enum
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from crc32c import crc32c
from msgspec.structs import replace

from contrail_storage.disk.files import Files

_HEADER: Final = struct.Struct("<4sBxxxI")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"CTNF"
_VERSION: Final = 1
_IDENTITY_VERSION: Final = 2
IDENTITY_NAME: Final = "identity"
LOG_NAME: Final = "wal"
_log = structlog.get_logger("contrail.node")


NO_CLUSTER: Final = bytes(16)
"""The id of the cluster of a node that is in none, or in one that has no id yet."""


class NodeFileDamagedError(Exception):
    """A small node file exists, but its content is not what was written."""


class Stage(enum.IntEnum):
    """How far a node is part of a cluster."""

    EMPTY = 0
    PREPARED = 1
    FORMED = 2


class NodeIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The identity of a node, its place in a cluster, and whether its folder is encrypted.

    A node alone is a formed cluster of one, and has number 1. The incarnation increases when the
    node has lost its data; `boots` increases with each start that changes the folder, so that a
    copy of an older folder is noticed. Encryption never changes, and neither does whether the node
    is `alone`. `nodes` are the names with which the cluster was formed, in order.
    `has_unreplicated`: whether the folder may have shards without replicas on other nodes.
    """

    node_id: str
    incarnation: int
    encrypted: bool = False
    cluster_id: bytes = NO_CLUSTER
    node_number: int = 1
    boots: int = 0
    stage: Stage = Stage.FORMED
    alone: bool = True
    nodes: tuple[str, ...] = ()
    has_unreplicated: bool = True

    @classmethod
    def of_empty(cls, node_id: str, *, encrypted: bool) -> "NodeIdentity":
        """The identity of an empty folder, whose node has yet to join its cluster."""
        return cls(
            node_id,
            1,
            encrypted,
            node_number=0,
            stage=Stage.EMPTY,
            alone=False,
            has_unreplicated=False,
        )


def write_node_file(files: Files, path: Path, payload: bytes) -> None:
    """Replace the content of a file, durably. After an OSError, the old content is intact."""
    temporary = path.with_name(path.name + ".new")
    # A leftover of a crash or of a failed attempt: `create` refuses to overwrite a file.
    with suppress(FileNotFoundError):
        files.unlink(temporary)
    header = _HEADER.pack(_MAGIC, _VERSION, len(payload))
    handle = files.create(temporary)
    try:
        handle.write([header, _CRC.pack(crc32c(payload, crc32c(header))), payload])
        # Before the rename: otherwise the new name could survive a power cut, and the content not.
        handle.sync()
    finally:
        handle.close()
    files.rename(temporary, path)
    # The rename is durable only with the directory.
    files.sync_directory(path.parent)


def read_node_file(files: Files, path: Path) -> bytes:
    """Return the last written content. Raises NodeFileDamagedError, or OSError if it is missing."""
    content = files.read(path)
    body_start = _HEADER.size + _CRC.size
    header, payload = content[: _HEADER.size], content[body_start:]
    if len(content) < body_start:
        raise NodeFileDamagedError(f"{path.name} is cut short")
    # The checksum is compared before the version, so that a damaged version byte is reported as
    # damage and not as the file of a newer release.
    magic, version, length = _HEADER.unpack(header)
    (expected,) = _CRC.unpack_from(content, _HEADER.size)
    sound = magic == _MAGIC and length == len(payload)
    if not sound or crc32c(payload, crc32c(header)) != expected:
        raise NodeFileDamagedError(f"{path.name} does not match its checksum")
    if version != _VERSION:
        raise NodeFileDamagedError(f"{path.name} has version {version}, not {_VERSION}")
    return payload


def copy_of(path: Path) -> Path:
    """The second copy of a file that is kept twice."""
    return path.with_name(f"{path.name}.copy")


def write_twice(files: Files, path: Path, payload: bytes) -> None:
    """As :func:`write_node_file`, for a file and its copy."""
    write_node_file(files, copy_of(path), payload)
    write_node_file(files, path, payload)


def read_either(files: Files, path: Path) -> bytes:
    """As :func:`read_node_file`; from the copy if the file itself is damaged or missing."""
    try:
        return read_node_file(files, path)
    except (NodeFileDamagedError, FileNotFoundError) as error:
        try:
            payload = read_node_file(files, copy_of(path))
        except (NodeFileDamagedError, FileNotFoundError):
            raise error from None
        _log.warning("read_from_copy", file=path.name, reason=str(error))
        return payload


def save_identity(files: Files, directory: Path, identity: NodeIdentity) -> None:
    """Write the node's identity durably. Raises OSError."""
    fields = msgspec.to_builtins(identity, builtin_types=(bytes,))
    payload = msgspec.msgpack.encode({"version": _IDENTITY_VERSION, **fields})
    write_twice(files, directory / IDENTITY_NAME, payload)


def begin_boot(
    files: Files,
    directory: Path,
    identity: NodeIdentity,
    new_cluster_id: bytes,
    *,
    has_unreplicated: bool,
) -> NodeIdentity:
    """Note durably that the node starts, and return its identity from now on. Raises OSError.

    A node alone that is in no cluster yet forms one with ``new_cluster_id``.
    """
    cluster_id = identity.cluster_id
    if cluster_id == NO_CLUSTER and identity.stage is Stage.FORMED:
        cluster_id = new_cluster_id
    booted = replace(
        identity,
        cluster_id=cluster_id,
        boots=identity.boots + 1,
        has_unreplicated=has_unreplicated,
    )
    save_identity(files, directory, booted)
    return booted


def load_identity(files: Files, directory: Path) -> NodeIdentity | None:
    """Return the node's identity, or None on a node that never had one.

    Raises NodeFileDamagedError if the file exists and is damaged, and OSError if a newer release
    wrote it.
    """
    try:
        payload = read_either(files, directory / IDENTITY_NAME)
        fields = msgspec.msgpack.decode(payload, type=dict[str, Any])
        version = fields.pop("version", 1)  # release 0.2 wrote none, and no cluster
        if version not in (1, _IDENTITY_VERSION):
            raise OSError(f"the file {IDENTITY_NAME} is of a newer release (version {version})")
        return msgspec.convert(fields, NodeIdentity)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise NodeFileDamagedError(f"{IDENTITY_NAME} cannot be decoded") from error
