"""Refusals on the wire: the name in the error registry, and the details of this occurrence."""

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem


class WireError(msgspec.Struct, array_like=True, frozen=True):
    """An ApiError in msgpack; ``code`` is for a peer of a version that does not know the name."""

    name: str
    code: int
    detail: str
    fields: list[tuple[str, str]]
    applied: bool | None
    retry_after_s: int | None
    leader: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WireError)


def wire_error(error: ApiError) -> WireError:
    """Return ``error`` in the form that travels."""
    fields = [(one.pointer, one.message) for one in error.fields]
    return WireError(
        error.spec.name,
        error.spec.code,
        error.detail,
        fields,
        error.applied,
        error.retry_after_s,
        error.leader,
    )


def encode_error(error: ApiError) -> bytes:
    """Return ``error`` as the body of a frame."""
    return _encoder.encode(wire_error(error))


def decode_error(body: bytes | memoryview) -> ApiError:
    """Return the refusal in ``body``. Raises msgspec.DecodeError if there is none."""
    return api_error(_decoder.decode(body))


def api_error(wire: WireError) -> ApiError:
    """Return the refusal that arrived."""
    # The name first: variants share a code.
    spec = errors.BY_NAME.get(wire.name) or errors.REGISTRY.get(wire.code, errors.INTERNAL)
    fields = [FieldProblem(pointer, message) for pointer, message in wire.fields]
    return ApiError(spec, wire.detail, fields, wire.retry_after_s, wire.applied, leader=wire.leader)
