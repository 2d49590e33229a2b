"""The certificate that a router shows to its clients, over HTTP and gRPC. A new one on disk is taken over."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import grpc

from holdfast import tls
from holdfast.errors import ConfigError

log = logging.getLogger("holdfast.router")
LOOK_EVERY_S = 5.0


class ServedCertificate:
    """``certificate``: with the chain. Raises ConfigError for files that are none, or do not belong together."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._stamps = self._load()

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a port: of the certificate that is the current one at each handshake."""
        return tls.server_credentials(lambda: (*self._pem, None))

    async def keep(self) -> None:
        """Take over what is new on disk, as long as it is a certificate; connections go on with the one they have."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if _stamps(self._paths) != self._stamps:
                try:
                    self._stamps = self._load()
                    log.warning("%s is taken over", self._paths[0])
                except ConfigError as error:
                    log.error("%s; the certificate is that of before", error.message)

    def _load(self) -> tuple[int, ...]:
        stamps = _stamps(self._paths)
        certificate, key = self._paths
        try:
            # Tried apart: of a pair that does not belong together, the context would keep a half.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            self.context.load_cert_chain(certificate, key)
            self._pem = (key.read_bytes(), certificate.read_bytes())
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_certfile, ssl_keyfile: cannot use {certificate} and {key}: {error}") from None
        return stamps


def _stamps(paths: tuple[Path, ...]) -> tuple[int, ...]:
    try:
        return tuple(path.stat().st_mtime_ns for path in paths)
    except OSError:
        return ()
