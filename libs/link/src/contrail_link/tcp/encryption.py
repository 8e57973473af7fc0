"""TLS 1.3 on the link, on all connections between machines.

Certificates are not verified: the handshake of the secret covers the digest of the server's, so a
man in the middle, who has another one, cannot pass on a proof.
"""

import hashlib
import ipaddress
import ssl
from contextlib import suppress
from dataclasses import dataclass

from contrail_link.tcp.handshake import ONE_END

_NO_TLS = "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"
"""Why OpenSSL gives up if it reads something else."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's context, and the SHA-256 of its certificate."""

    context: ssl.SSLContext
    digest: bytes


def client_context() -> ssl.SSLContext:
    """Return the context of clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def shown_digest(tls: ssl.SSLObject | None) -> bytes:
    """Return the digest of the certificate that a client was shown; empty without TLS."""
    shown = None if tls is None else tls.getpeercert(binary_form=True)
    return b"" if shown is None else hashlib.sha256(shown).digest()


def explained(error: OSError) -> OSError:
    """Return the error of a client, with its cause if the server has answered without TLS."""
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return OSError(f"it speaks no TLS ({error}): {ONE_END}")
    return error


def is_loopback(host: str) -> bool:
    """Whether connections from or to this address stay on the machine, and need no TLS."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback
    return False
