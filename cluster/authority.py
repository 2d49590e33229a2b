"""A cluster's own certificate authority. Its key stays in the supervisor's process."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.tls import Identity, role_uri

LIFETIME = timedelta(hours=24)
"""Of a process's certificate: long enough that processes go on for a while without a supervisor."""
RENEW_S = LIFETIME.total_seconds() / 4
AUTHORITY_LIFETIME = timedelta(days=3650)
SKEW = timedelta(minutes=5)
"""Clocks of nodes may differ."""


class Authority:
    """Issues certificates for the processes of one cluster, valid for nothing else."""

    def __init__(self, lifetime: timedelta = LIFETIME) -> None:
        self.name = f"{uuid.uuid4().hex[:16]}.holdfast"
        self._lifetime = lifetime
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        self._certificate = (
            self._builder(subject, subject, self._key.public_key(), AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, role: str) -> Identity:
        """An identity for a process of that role, with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        names = [x509.DNSName(self.name), x509.UniformResourceIdentifier(role_uri(self.name, role))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(subject, self._certificate.subject, key.public_key(), self._lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Identity(
            name=self.name,
            authority=self._certificate.public_bytes(serialization.Encoding.PEM),
            certificate=certificate.public_bytes(serialization.Encoding.PEM),
            key=key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: timedelta
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
