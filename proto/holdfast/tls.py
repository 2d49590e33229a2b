"""Mutual TLS between a cluster's processes: who a process is, and what each service lets whom do.

Each process has one identity: a certificate of the cluster's authority, which names the cluster and the process's role.
A server wants such a certificate of every caller, and asks for the caller's role method by method. Without an identity
links are in clear text, as in tests and with ``insecure_internal``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from holdfast.interceptors import checked
from holdfast.wire import CHANNEL_OPTIONS, SERVER_OPTIONS, abort_with, agent_option, version_error

SUPERVISOR, ROUTER, LEADER, RANK, STORE = ROLES = ("supervisor", "router", "leader", "rank", "store")
ANY = frozenset(ROLES)
CALLERS = {
    "/holdfast.v1.WorkerService/Export": frozenset((LEADER,)),
    "/holdfast.v1.WorkerService/": frozenset((ROUTER,)),
    "/holdfast.v1.RankService/": frozenset((LEADER,)),
    "/holdfast.v1.KVService/": frozenset((LEADER, RANK)),
    "/holdfast.v1.KVStorePeerService/": frozenset((STORE,)),
    "/grpc.health.v1.Health/": ANY,
    "/grpc.reflection.v1alpha.ServerReflection/": ANY,
}
"""Who may call what: by method, else by service. What is not here is nobody's."""
RENEWAL_PAUSE_S = 0.05
"""How long a listener waits before it shows another certificate: a handshake takes hold of the one of before within
microseconds."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process's, as PEM. ``name``: the cluster's, which all its certificates are valid for."""

    name: str
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


class _Process:
    identity: Identity | None = None


def use_identity(identity: Identity | None) -> None:
    """Who this process is from now on. Servers show it in their next handshake, clients in their next channel."""
    _Process.identity = identity


def identity() -> Identity | None:
    """Who this process is."""
    return _Process.identity


def server(options: Sequence[tuple[str, Any]] = SERVER_OPTIONS) -> grpc.aio.Server:
    """A server for the cluster's processes."""
    interceptors: list[Any] = [_AskForVersion()]
    if _Process.identity is not None:
        interceptors.append(_AskForRole(_Process.identity.name))
    return grpc.aio.server(options=list(options), interceptors=interceptors)


def listen(server: grpc.aio.Server, address: str) -> int:
    """Have a server listen. Returns the port."""
    if _Process.identity is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(_shown)))


def channel(address: str, options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS) -> grpc.aio.Channel:
    """A channel to a process of the cluster."""
    identity, options = _Process.identity, [agent_option(), *options]
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(identity.authority, identity.key, identity.certificate)
    # A process is reached by address; what is verified is that it is of this cluster.
    named = [*options, ("grpc.ssl_target_name_override", identity.name)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def server_credentials(
    current: Callable[[], tuple[bytes, bytes, bytes | None]],
) -> grpc.ServerCredentials:
    """For a port that shows what ``current`` returns: a key, its certificate with the chain, and the authority.

    With an authority, callers need a certificate of it. A renewed certificate needs no restart: gRPC asks in each
    handshake. It is told of a change alone, after a pause: it frees the configuration of before at once, also while
    another handshake is about to read it, and the process dies (grpc/grpc issue 36693).
    """
    shown = current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        now = current()
        if now == shown:
            return None
        shown = now
        time.sleep(RENEWAL_PAUSE_S)  # gRPC lets no other handshake begin meanwhile
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), renewed, shown[2] is not None)


def role_uri(cluster: str, role: str) -> str:
    """What a certificate says of its holder."""
    return f"holdfast://{cluster}/{role}"


def _shown() -> tuple[bytes, bytes, bytes]:
    identity = _Process.identity
    assert identity is not None, "a process does not lose its identity"
    return identity.key, identity.certificate, identity.authority


def _configuration(pem: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    key, certificate, authority = pem
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


class _AskForVersion(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types here
    """Refuses callers whose version of the messages is too far from this process's."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        agent = next((value for key, value in details.invocation_metadata if key == "user-agent"), "")
        error = version_error(str(agent))
        if handler is None or error is None:
            return handler

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            await abort_with(context, error)

        return checked(handler, refuse)


class _AskForRole(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types here
    """Refuses callers whose certificates do not name the cluster and a role that may call the method."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        service = details.method[: details.method.rindex("/") + 1]
        roles = CALLERS.get(details.method, CALLERS.get(service, frozenset()))
        allowed = {role_uri(self._cluster, role).encode() for role in roles}

        async def check(request: Any, context: grpc.aio.ServicerContext) -> None:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            if allowed.isdisjoint(names):
                message = f"this certificate's role may not call {details.method}"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)

        return checked(handler, check)
