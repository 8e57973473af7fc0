"""Small files that are replaced whole: either the old content or the new survives a power cut."""

import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from crc32c import crc32c

from contrail_storage.disk.files import Files

_HEADER: Final = struct.Struct("<4sBxxxI")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"CTNF"
_VERSION: Final = 1
IDENTITY_NAME: Final = "identity"
LOG_NAME: Final = "wal"


class NodeFileDamagedError(Exception):
    """A small node file exists but is not what was written."""


class NodeIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who this node is, and whether its folder is encrypted, which never changes.

    The incarnation goes up when the node lost its data.
    """

    node_id: str
    incarnation: int
    encrypted: bool = False


def write_node_file(files: Files, path: Path, payload: bytes) -> None:
    """Replace the file's content; on return it is durable. Raises OSError, old content intact."""
    temporary = path.with_name(path.name + ".new")
    with suppress(FileNotFoundError):
        files.unlink(temporary)
    header = _HEADER.pack(_MAGIC, _VERSION, len(payload))
    handle = files.create(temporary)
    try:
        handle.write([header, _CRC.pack(crc32c(payload, crc32c(header))), payload])
        handle.sync()
    finally:
        handle.close()
    files.rename(temporary, path)
    files.sync_directory(path.parent)


def read_node_file(files: Files, path: Path) -> bytes:
    """Return what was last written. Raises FileNotFoundError, NodeFileDamagedError or OSError."""
    content = files.read(path)
    body_start = _HEADER.size + _CRC.size
    header, payload = content[: _HEADER.size], content[body_start:]
    if len(content) < body_start:
        raise NodeFileDamagedError(f"{path.name} is cut short")
    magic, version, length = _HEADER.unpack(header)
    (expected,) = _CRC.unpack_from(content, _HEADER.size)
    sound = magic == _MAGIC and length == len(payload)
    if not sound or crc32c(payload, crc32c(header)) != expected:
        raise NodeFileDamagedError(f"{path.name} does not match its checksum")
    if version != _VERSION:
        raise NodeFileDamagedError(f"{path.name} has version {version}, not {_VERSION}")
    return payload


def save_identity(files: Files, directory: Path, identity: NodeIdentity) -> None:
    """Write the node's identity durably. Raises OSError."""
    write_node_file(files, directory / IDENTITY_NAME, msgspec.msgpack.encode(identity))


def load_identity(files: Files, directory: Path) -> NodeIdentity | None:
    """Return the node's identity, or None on a node that never had one.

    Raises NodeFileDamagedError when the file is there but cannot be trusted.
    """
    try:
        payload = read_node_file(files, directory / IDENTITY_NAME)
        return msgspec.msgpack.decode(payload, type=NodeIdentity)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise NodeFileDamagedError(f"{IDENTITY_NAME} cannot be decoded") from error
