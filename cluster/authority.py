"""Who issues the certificates of a cluster's processes. Its key stays in the supervisor's process."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.errors import ConfigError
from holdfast.tls import Identity, role_uri

LIFETIME = timedelta(hours=24)
"""Of a process's certificate: long enough that processes go on for a while without a supervisor."""
RENEW_S = LIFETIME.total_seconds() / 4
AUTHORITY_LIFETIME = timedelta(days=3650)
SKEW = timedelta(minutes=5)
"""Clocks of nodes may differ."""
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True, slots=True)
class Issuer:
    """What certificates are signed with. ``roots``: PEM of what processes trust; ``chain``: PEM of what they show of
    those between a root and themselves.
    """

    certificate: x509.Certificate
    key: PrivateKey = field(repr=False)
    roots: bytes
    chain: bytes = b""


@dataclass(frozen=True, slots=True)
class SealedAuthority:
    """An authority on its way to another process, which its key reaches over the cluster's own connections. All PEM."""

    name: str
    certificate: bytes
    key: bytes = field(repr=False)
    roots: bytes
    chain: bytes


class Authority:
    """Issues certificates for the processes of one cluster, valid for nothing else."""

    def __init__(self, lifetime: timedelta = LIFETIME, issuer: Issuer | None = None, name: str = "") -> None:
        """``issuer``: None for one of its own. ``name``: of the cluster, in its certificates; empty: a new one."""
        self.name = name or f"{uuid.uuid4().hex[:16]}.holdfast"
        self._lifetime = lifetime
        self._issuer = issuer or _own_issuer(self.name)

    def sealed(self) -> SealedAuthority:
        """All that another supervisor of this cluster needs to issue the same certificates: the key is among it."""
        pem, issuer = serialization.Encoding.PEM, self._issuer
        key = issuer.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return SealedAuthority(self.name, issuer.certificate.public_bytes(pem), key, issuer.roots, issuer.chain)

    @classmethod
    def unsealed(cls, sealed: SealedAuthority) -> Authority:
        key = serialization.load_pem_private_key(sealed.key, None)
        assert isinstance(key, PrivateKey), "it was an authority's"
        issuer = Issuer(x509.load_pem_x509_certificate(sealed.certificate), key, sealed.roots, sealed.chain)
        return cls(issuer=issuer, name=sealed.name)

    def issue(self, role: str) -> Identity:
        """An identity for a process of that role, with a key of its own."""
        key, issuer = ec.generate_private_key(ec.SECP256R1()), self._issuer
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        names = [x509.DNSName(self.name), x509.UniformResourceIdentifier(role_uri(self.name, role))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(subject, issuer.certificate.subject, key.public_key(), self._lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(issuer.key, hashes.SHA256())
        )
        return Identity(
            name=self.name,
            authority=issuer.roots,
            certificate=certificate.public_bytes(serialization.Encoding.PEM) + issuer.chain,
            key=key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )


def read_issuer(ca: Path, cert: Path, key: Path) -> Issuer:
    """An authority's certificate and key, from PEM files, and the root that issued it: it may be the root itself.

    Raises ConfigError.
    """
    root, certificate = _read_certificate("tls_ca", ca), _read_certificate("tls_cert", cert)
    try:
        signing_key = serialization.load_pem_private_key(_read("tls_key", key), None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tls_key: {key} is not a PEM key without a password: {error}") from None
    if not isinstance(signing_key, PrivateKey) or signing_key.public_key() != certificate.public_key():
        raise ConfigError(f"tls_key: {key} is not the key of {cert}, or neither RSA nor elliptic")
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    if not is_authority:
        raise ConfigError(f"tls_cert: {cert} may not issue certificates (it is not a CA); each process has its own")
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(f"tls_cert: {cert} is not issued by {ca}") from None
    if certificate.not_valid_after_utc < datetime.now(UTC) + LIFETIME:
        raise ConfigError(f"tls_cert: {cert} expires {certificate.not_valid_after_utc.isoformat(timespec='seconds')}")
    pem = serialization.Encoding.PEM
    chain = b"" if certificate == root else certificate.public_bytes(pem)
    return Issuer(certificate, signing_key, root.public_bytes(pem), chain)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None


def _read_certificate(name: str, path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(name, path))
    except ValueError as error:
        raise ConfigError(f"{name}: {path} is not a PEM certificate: {error}") from None


def _own_issuer(name: str) -> Issuer:
    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, subject, key.public_key(), AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Issuer(certificate, key, certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + lifetime)
    )
