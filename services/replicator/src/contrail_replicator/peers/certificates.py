"""TLS between nodes: certificates of the operator's, or one made at the start."""

import contextlib
import datetime
import hashlib
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_VALID: Final = datetime.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class PeerTls:
    """How this node speaks TLS with others, in both roles. Only TLS 1.3 is spoken.

    With an ``authority``, both ends show certificates that it has signed and that name their nodes.
    Without one, the listener's certificate is not verified: the handshake of the secret covers its
    digest, which is as good.
    """

    listening: ssl.SSLContext
    dialling: ssl.SSLContext
    digest: bytes
    """SHA-256 of the own certificate."""
    verified: bool
    """True if certificates are verified."""


def made_tls(name: str) -> PeerTls:
    """Return TLS with a certificate made for this process only."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    # The ssl module reads certificates from files only.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peer.pem"
        path.touch(0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        return _tls(path, path, None)


class CertificateError(Exception):
    """The operator's certificates cannot be used; the text says why."""


def loaded_tls(certificate: Path, key: Path, authority: Path) -> PeerTls:
    """Return TLS with the operator's certificates. Raises CertificateError."""
    try:
        return _tls(certificate, key, authority)
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"the certificate in {certificate}, with the key in {key} and the authority in "
            f"{authority}, cannot be used: {error}"
        ) from error


def check_certified(certificate: Path, name: str) -> None:
    """Raise CertificateError unless a certificate, which can be read, names a node."""
    found = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    names: list[str] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.DNSName)
    if name not in names:
        shown = ", ".join(names) or "nobody"
        raise CertificateError(f"the certificate in {certificate} names {shown}, not {name}")


def _tls(certificate: Path, key: Path, authority: Path | None) -> PeerTls:
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialling.check_hostname = authority is not None
    for context in (listening, dialling):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        context.verify_mode = ssl.CERT_NONE if authority is None else ssl.CERT_REQUIRED
        if authority is not None:
            context.load_verify_locations(authority)
    # Each connection proves the secret anyway, so a resumed session would save nothing.
    listening.num_tickets = 0
    found = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    der = found.public_bytes(serialization.Encoding.DER)
    return PeerTls(listening, dialling, hashlib.sha256(der).digest(), authority is not None)


def names_in(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the DNS names of a verified certificate, as `ssl.SSLObject.getpeercert` gives it."""
    names = (certificate or {}).get("subjectAltName", ())
    return frozenset(value for kind, value in names if kind == "DNS")
