"""Links between a cluster's processes: who may call what, and what strangers find."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.authority import Authority, Issuer, read_issuer
from holdfast import tls
from holdfast.errors import ConfigError
from holdfast.tls import CALLERS, LEADER, ROLES, ROUTER, SUPERVISOR, Identity
from holdfast.v1 import (
    kv_pb2,
    kv_pb2_grpc,
    rank_pb2,
    rank_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.cluster.served import Served, serving
from tests.harness import HOST, start_group, stop_group
from workers.config import EngineConfig

SERVICES: dict[str, tuple[Any, Any, Any, str]] = {
    "WorkerService": (worker_pb2, worker_pb2_grpc.WorkerServiceServicer, worker_pb2_grpc, "worker"),
    "RankService": (rank_pb2, rank_pb2_grpc.RankServiceServicer, rank_pb2_grpc, "rank"),
    "KVService": (kv_pb2, kv_pb2_grpc.KVServiceServicer, kv_pb2_grpc, "kv"),
    "KVStorePeerService": (store_pb2, store_pb2_grpc.KVStorePeerServiceServicer, store_pb2_grpc, "store"),
}
RESETS = 5
LET_IN = "UNIMPLEMENTED"


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """This process is nobody again after each test."""
    yield
    tls.use_identity(None)


@asynccontextmanager
async def doors(authority: Authority) -> AsyncIterator[str]:
    """A server of every service, behind which nothing is done. Yields its address."""
    tls.use_identity(authority.issue(LEADER))
    server = tls.server()
    for name, (_, servicer, module, _) in SERVICES.items():
        getattr(module, f"add_{name}Servicer_to_server")(servicer(), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    port = tls.listen(server, f"{HOST}:0")
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def calling_as(identity: Identity | None, address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of a process with that identity; the server's stays what it was."""
    own = tls.identity()
    tls.use_identity(identity)
    # Channels of a process share connections, whoever they say they are: not these.
    channel = tls.channel(address, [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)])
    tls.use_identity(own)
    try:
        yield channel
    finally:
        await channel.close()


async def outcome(channel: grpc.aio.Channel, service: str, method: Any) -> str:
    """How a call ends.

    A server that ends a call before it has read what is still being written resets the stream. The client may see the
    reset first: it says INTERNAL then, and is to ask again.
    """
    for _ in range(RESETS):
        ended = await _call(channel, service, method)
        if ended != "INTERNAL" or not method.client_streaming:
            break
    return ended


async def _call(channel: grpc.aio.Channel, service: str, method: Any) -> str:
    stub = getattr(SERVICES[service][2], f"{service}Stub")(channel)
    call = getattr(stub, method.name)
    request = method.input_type._concrete_class()
    try:
        answer = call(iter([request]) if method.client_streaming else request, timeout=10)
        if method.server_streaming:
            await answer.read()
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def methods() -> list[tuple[str, Any]]:
    return [
        (service, method)
        for service, (messages, _, _, _) in SERVICES.items()
        for method in messages.DESCRIPTOR.services_by_name[service].methods
    ]


def test_every_service_between_processes_is_looked_at() -> None:
    known = {name.split("/")[1].split(".")[-1] for name in CALLERS}
    assert known == {*SERVICES, "Health", "ServerReflection"}


async def test_every_method_asks_for_its_role() -> None:
    authority, wrong = Authority(), []
    async with doors(authority) as address:
        for role in ROLES:
            async with calling_as(authority.issue(role), address) as channel:
                for service, method in methods():
                    full = f"/holdfast.v1.{service}/{method.name}"
                    may = role in CALLERS.get(full, CALLERS[f"/holdfast.v1.{service}/"])
                    got = await outcome(channel, service, method)
                    if got != (LET_IN if may else "PERMISSION_DENIED"):
                        wrong.append((role, full, got))
                check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
                assert (await check).status == health_pb2.HealthCheckResponse.SERVING
    assert not wrong


@pytest.mark.parametrize("who", ["clear text", "no certificate", "another cluster", "expired"])
async def test_strangers_get_no_connection(who: str) -> None:
    authority = Authority()
    async with doors(authority) as address:
        identity: Identity | None = None
        if who == "another cluster":
            other = Authority()
            other.name = authority.name
            identity = other.issue(ROUTER)
        elif who == "expired":
            past = Authority(lifetime=timedelta(hours=-1))
            past.name, past._issuer = authority.name, authority._issuer
            past._lifetime = timedelta(seconds=-60)
            identity = past.issue(ROUTER)
        if who == "no certificate":
            trust = grpc.ssl_channel_credentials(authority.issue(ROUTER).authority)
            options = [("grpc.ssl_target_name_override", authority.name)]
            channel = grpc.aio.secure_channel(address, trust, options=options)
            assert await outcome(channel, *methods()[0]) == "UNAVAILABLE"
            await channel.close()
            return
        async with calling_as(identity, address) as channel:
            for service, method in methods():
                assert await outcome(channel, service, method) == "UNAVAILABLE"


async def test_a_certificate_of_the_same_authority_for_another_cluster_is_refused() -> None:
    """As when two clusters have the authority of one company."""
    authority = Authority()
    mine = authority.name
    async with doors(authority) as address:
        authority.name = "another.holdfast"
        stranger = authority.issue(ROUTER)
        authority.name = mine
        credentials = grpc.ssl_channel_credentials(stranger.authority, stranger.key, stranger.certificate)
        options = [("grpc.ssl_target_name_override", mine), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            for service, method in methods():
                assert await outcome(channel, service, method) == "PERMISSION_DENIED"


def certificate_of(
    name: str, key: ec.EllipticCurvePrivateKey, by: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None, ca: bool
) -> x509.Certificate:
    """As an operator's tools would make one; signed by itself if by nobody else."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now, issuer, signer = datetime.now(UTC), by[0].subject if by else subject, by[1] if by else key
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )


class Company:
    """A root, an authority under it, and their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root_key, self.key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        self.root = certificate_of("company", self.root_key, None, True)
        self.under = certificate_of("inference", self.key, (self.root, self.root_key), True)
        self.leaf = certificate_of("host", self.key, (self.root, self.root_key), False)
        for name in ("root", "under", "leaf"):
            (folder / f"{name}.pem").write_bytes(getattr(self, name).public_bytes(serialization.Encoding.PEM))
        for name in ("root_key", "key"):
            pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
            (folder / f"{name}.pem").write_bytes(
                getattr(self, name).private_bytes(pem, form, serialization.NoEncryption())
            )

    def issuer(self, ca: str, cert: str, key: str) -> Issuer:
        return read_issuer(*(self.folder / f"{name}.pem" for name in (ca, cert, key)))


@pytest.mark.parametrize("names", [("root", "under", "key"), ("root", "root", "root_key")])
async def test_a_companys_authority_issues_certificates(names: tuple[str, str, str], tmp_path: Path) -> None:
    company = Company(tmp_path)
    authority, other = (Authority(issuer=company.issuer(*names)) for _ in range(2))
    async with doors(authority) as address:
        async with calling_as(authority.issue(ROUTER), address) as channel:
            assert await outcome(channel, "WorkerService", methods()[0][1]) in (LET_IN, "PERMISSION_DENIED")
            stats = next(method for service, method in methods() if method.name == "Stats")
            assert await outcome(channel, "WorkerService", stats) == LET_IN
        # Another cluster of the same company is as strange as any.
        other_identity = other.issue(ROUTER)
        credentials = grpc.ssl_channel_credentials(
            other_identity.authority, other_identity.key, other_identity.certificate
        )
        options = [("grpc.ssl_target_name_override", authority.name), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            assert await outcome(channel, "WorkerService", stats) == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("root", "leaf", "key"), "may not issue certificates"),
        (("root", "under", "root_key"), "is not the key of"),
        (("under", "root", "root_key"), "is not issued by"),
        (("key", "under", "key"), "tls_ca: .* is not a PEM certificate"),
        (("root", "under", "root"), "tls_key: .* is not a PEM key"),
        (("nothing", "under", "key"), "tls_ca: cannot read"),
    ],
)
def test_an_authority_that_cannot_be_one_is_refused(names: tuple[str, str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        Company(tmp_path).issuer(*names)


async def test_a_renewed_certificate_breaks_no_stream_and_serves_the_next() -> None:
    authority = Authority()
    tls.use_identity(authority.issue(LEADER))
    leader, followers, address = await start_group("w", 1, EngineConfig(max_total_tokens=1024, overlap_schedule=True))
    try:
        async with calling_as(authority.issue(ROUTER), address) as channel:
            stream = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
            assert (await stream.read()).welcome.worker_id == "w"
            # What the server has shown so far is worth nothing from now on.
            renewed = authority.issue(LEADER)
            tls.use_identity(renewed)
            assert (await stream.read()).WhichOneof("message") == "beat"
            async with calling_as(authority.issue(ROUTER), address) as later:
                stats = await worker_pb2_grpc.WorkerServiceStub(later).Stats(worker_pb2.StatsRequest(), timeout=10)
                assert stats.worker_id == "w"
            assert (await stream.read()).WhichOneof("message") == "beat"
            stream.cancel()
    finally:
        await stop_group(leader, followers)


def test_no_key_is_in_what_is_printed() -> None:
    identity = Authority().issue(SUPERVISOR)
    assert "PRIVATE" in identity.key.decode() and "PRIVATE" not in repr(identity)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("tls"), "--tp", "2", "--hicache-size", "0.05", "--workers", "1") as cluster:
        yield cluster


async def test_no_port_of_a_running_cluster_answers_a_stranger(served: Served) -> None:
    """Every port on which a process of ours listens: Ray's and ours."""
    assert served.ask("status"), "it serves"
    ours = [
        process
        for process in psutil.Process(served.process.pid).children(recursive=True)
        if process.name().startswith(("ray::Rank", "ray::KVStore"))
    ]
    assert len(ours) == 3
    listening = [
        f"{connection.laddr.ip}:{connection.laddr.port}"
        for process in ours
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    # Side by side: what does not speak gRPC is silent until the call's deadline.
    refused = await asyncio.gather(*map(_refusals_at, listening))
    assert {*itertools.chain(*refused)} <= {"UNAVAILABLE", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "INTERNAL"}


async def _refusals_at(address: str) -> list[str]:
    """How each service refuses a stranger's call there."""
    codes = []
    async with grpc.aio.insecure_channel(address) as channel:
        for call in (
            worker_pb2_grpc.WorkerServiceStub(channel).Stats(worker_pb2.StatsRequest(), timeout=3),
            store_pb2_grpc.KVStorePeerServiceStub(channel).Find(store_pb2.PeerKeys(), timeout=3),
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            codes.append(error.value.code().name)
    return codes


SERVER = """
import asyncio, sys
from cluster.authority import Authority
from holdfast import tls

async def serve():
    authority = Authority()
    tls.use_identity(authority.issue("leader"))
    server = tls.server()
    print(tls.listen(server, "127.0.0.1:0"), authority.name, flush=True)
    await server.start()
    while True:
        await asyncio.sleep(0.2)
        tls.use_identity(authority.issue("leader"))

asyncio.run(serve())
"""


def test_handshakes_at_once_do_not_end_a_server_whose_certificate_is_renewed() -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port, name = server.stdout.readline().split()

        def shake_hands(_: int) -> None:
            with socket.create_connection((HOST, int(port)), timeout=20) as plain:
                context.wrap_socket(plain, server_hostname=name).close()

        try:
            with ThreadPoolExecutor(16) as threads:
                list(threads.map(shake_hands, range(1500)))
            assert server.poll() is None
        finally:
            server.kill()
