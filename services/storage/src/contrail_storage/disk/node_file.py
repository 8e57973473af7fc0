"""Small files that are replaced as a whole: a power cut leaves the old content or the new."""

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
    """A small node file exists, but its content is not what was written."""


class NodeIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The identity of a node, and whether its folder is encrypted. Encryption never changes.

    The incarnation increases when the node has lost its data.
    """

    node_id: str
    incarnation: int
    encrypted: bool = False


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


def save_identity(files: Files, directory: Path, identity: NodeIdentity) -> None:
    """Write the node's identity durably. Raises OSError."""
    write_node_file(files, directory / IDENTITY_NAME, msgspec.msgpack.encode(identity))


def load_identity(files: Files, directory: Path) -> NodeIdentity | None:
    """Return the node's identity, or None on a node that never had one.

    Raises NodeFileDamagedError if the file exists and is damaged.
    """
    try:
        payload = read_node_file(files, directory / IDENTITY_NAME)
        return msgspec.msgpack.decode(payload, type=NodeIdentity)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise NodeFileDamagedError(f"{IDENTITY_NAME} cannot be decoded") from error
