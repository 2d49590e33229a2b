"""TLS for clients: real handshakes, and certificates that change while a router serves."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509

from cluster.authority import Authority
from cluster.config import load_config
from holdfast.errors import ConfigError
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.access import certificate
from router.access.certificate import ServedCertificate
from tests.harness import HOST, running


class Files:
    """A certificate and its key on disk."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.certificate, self.key, self.trusted = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self._authority = authority

    def write(self) -> int:
        """Another certificate. Returns its number."""
        identity = self._authority.issue("server")
        self.trusted.write_bytes(identity.authority)
        self.key.write_bytes(identity.key)
        self.certificate.write_bytes(identity.certificate)
        return x509.load_pem_x509_certificate(identity.certificate).serial_number


async def shown_at(port: int) -> int:
    """The number of the certificate that a port shows now."""
    shown = await asyncio.to_thread(ssl.get_server_certificate, (HOST, port), timeout=10)
    return x509.load_pem_x509_certificate(shown.encode()).serial_number


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path, Authority())
    made.write()
    return made


async def test_both_ports_speak_tls_and_take_a_new_certificate_over(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "LOOK_EVERY_S", 0.05)
    first = files.write()
    async with running(tmp_path, num_workers=1, ssl_certfile=files.certificate, ssl_keyfile=files.key) as cluster:
        port = int(cluster.url.rpartition(":")[2])
        name = files._authority.name
        trust = ssl.create_default_context(cafile=str(files.trusted))
        options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
        credentials = grpc.ssl_channel_credentials(files.trusted.read_bytes())
        request = pb.GenerateRequest(text="Return the", sampling=pb.Sampling(max_tokens=400, ignore_eos=True))
        async with (
            httpx.AsyncClient(verify=trust, timeout=30) as http,
            grpc.aio.secure_channel(cluster.grpc_targets[0], credentials, options=options) as channel,
        ):
            extensions = {"sni_hostname": name}
            assert (await http.get(f"https://{HOST}:{port}/v1/models", extensions=extensions)).status_code == 200
            stream = session_pb2_grpc.SessionServiceStub(channel).Generate(request)
            answers = aiter(stream)
            num_tokens = len((await anext(answers)).tokens)
            grpc_port = int(cluster.grpc_targets[0].rpartition(":")[2])
            assert await shown_at(port) == await shown_at(grpc_port) == first
            second = files.write()
            async with asyncio.timeout(10):
                while await shown_at(port) != second:
                    await asyncio.sleep(0.05)
            assert await shown_at(grpc_port) == second

            async for answer in answers:
                num_tokens += len(answer.tokens)
            assert num_tokens == 400, "the stream went on"
            files.certificate.write_text("no certificate")
            assert (await http.get(f"https://{HOST}:{port}/health", extensions=extensions)).status_code == 200
            assert await shown_at(port) == second, "what was there stays"
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(f"http://{HOST}:{port}/health", timeout=5)
        async with cluster.channel() as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await session_pb2_grpc.SessionServiceStub(plain).List(pb.ListRequest(), timeout=3)


def test_files_that_are_none_or_do_not_belong_together_are_refused(files: Files, tmp_path: Path) -> None:
    key = files.key.read_bytes()
    files.write()
    good = ServedCertificate(files.certificate, files.key)
    files.key.write_bytes(key)
    for certificate_file in (files.certificate, files.key, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"ssl_certfile, ssl_keyfile: cannot use"):
            ServedCertificate(certificate_file, files.key)
    with pytest.raises(ConfigError):
        good._load()
    with pytest.raises(ConfigError, match="TLS needs both"):
        load_config(None, {"ssl_certfile": str(files.certificate)})
