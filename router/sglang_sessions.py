"""SGLang's sessions that branch: each request goes on from any earlier one, which it names by ``rid``.

The session is a tree of requests. A branch of it is one session of ours: a request that goes on from
the last of a branch, with all it has, continues there; any other starts a branch with a fork, which
shares the pages up to where it leaves. So no request ever cuts what another may still go on from.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from urllib.parse import quote, unquote

from pydantic import BaseModel

from holdfast.errors import InvalidRequest, SessionBusy, SessionExists, SessionNotFound
from router.fields import Int32, Name
from router.gateway import Gateway
from router.sessions import Session
from router.turns import TurnChunk, TurnRequest


class Node(BaseModel):
    """A request that is done. Lengths are of the whole sequence: its context and input, and its output."""

    branch: str
    parent: str | None
    prompt_len: int
    end_len: int


class SessionParams(BaseModel):
    """``session_params`` of a request, as SGLang documents them."""

    id: Name | None = None
    rid: Name | None = None
    """The request to go on from; none: from nothing."""
    offset: Int32 | None = None
    """How much of that request's sequence to keep; none or 0: all of it."""
    replace: bool | None = None
    """Forget what went on from it before."""
    drop_previous_output: bool | None = None


class _MovedOn(InvalidRequest):
    """Another request went on in this branch first."""


class BranchingSessions:
    """Trees of requests, kept in the journal."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._journal = gateway.journal

    async def open(self, session_id: str, tenant: str) -> None:
        await self._gateway.control.open_session(session_id, tenant)
        await self._journal.put_objects(tenant, {_key("tree", session_id): b""})

    async def has(self, session_id: str, tenant: str) -> bool:
        """Whether that is a session that branches."""
        return await self._journal.get_object(tenant, _key("tree", session_id)) is not None

    async def close(self, session_id: str, tenant: str) -> None:
        """Release every branch. Raises SessionNotFound."""
        await self._forget(session_id, tenant, await self._nodes(session_id, tenant))
        await self._gateway.control.release(session_id, tenant)
        await self._journal.delete_objects(tenant, [_key("tree", session_id)])

    async def run(
        self, request: TurnRequest, params: SessionParams, ids_after: Callable[[int], Awaitable[array[int]]]
    ) -> AsyncIterator[TurnChunk]:
        """Run a request of the tree; ``ids_after`` gives its input, told how many tokens come before it.

        Raises InvalidRequest for a ``rid`` that is unknown or not done, or an ``offset`` past its end.
        """
        assert params.id is not None
        tree, tenant, own_branch = params.id, request.tenant, f"{params.id}/{request.turn_id}"
        parent = await self._parent(tree, tenant, params)
        keep_len = _keep_len(parent, params)
        goes_on = parent is not None and keep_len == parent.end_len
        request.session_id = parent.branch if parent is not None and goes_on else own_branch
        if parent is not None and not goes_on:
            await self._branch(parent, tenant, own_branch, keep_len)

        async def prepare(session: Session | None) -> tuple[int, array[int]]:
            if goes_on and request.session_id != own_branch and not params.replace:
                head = await self._journal.get_object(tenant, f"head/{request.session_id}")
                if head != (params.rid or "").encode():
                    raise _MovedOn("another request went on from there")
            return keep_len, await ids_after(keep_len)

        request.prepare = prepare
        try:
            async for chunk in self._finishing(tree, request, params.rid):
                yield chunk
        except (_MovedOn, SessionBusy):
            if parent is None or request.session_id == own_branch:
                raise
            await self._branch(parent, tenant, own_branch, keep_len)
            request.session_id = own_branch
            async for chunk in self._finishing(tree, request, params.rid):
                yield chunk

    async def _finishing(self, tree: str, request: TurnRequest, parent: str | None) -> AsyncIterator[TurnChunk]:
        stream = self._gateway.run(request)
        try:
            async for chunk in stream:
                if chunk.finish_reason in ("stop", "length"):
                    end_len = chunk.prompt_len + chunk.index + len(chunk.tokens)
                    node = Node(branch=request.session_id, parent=parent, prompt_len=chunk.prompt_len, end_len=end_len)
                    written = {
                        _key("node", tree, request.turn_id): node.model_dump_json().encode(),
                        f"head/{request.session_id}": request.turn_id.encode(),
                    }
                    await self._journal.put_objects(request.tenant, written)
                yield chunk
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _parent(self, tree: str, tenant: str, params: SessionParams) -> Node | None:
        nodes = await self._nodes(tree, tenant) if params.replace else {}
        if params.replace:
            await self._forget(tree, tenant, _after(params.rid, nodes))
        if params.rid is None:
            return None
        found = await self._journal.get_object(tenant, _key("node", tree, params.rid))
        if found is None:
            raise InvalidRequest(f"session_params.rid: no request {params.rid} of session {tree} is done")
        return Node.model_validate_json(found)

    async def _branch(self, parent: Node, tenant: str, branch: str, at_len: int) -> None:
        with suppress(SessionExists):  # asked again
            await self._gateway.control.fork(parent.branch, tenant, branch, at_len)

    async def _nodes(self, tree: str, tenant: str) -> dict[str, Node]:
        found = await self._journal.list_objects(tenant, _key("node", tree, ""))
        return {unquote(key.rpartition("/")[2]): Node.model_validate_json(value) for key, value in found}

    async def _forget(self, tree: str, tenant: str, gone: dict[str, Node]) -> None:
        """Forget requests, and release the branches that none is left of."""
        if not gone:
            return
        await self._journal.delete_objects(tenant, [_key("node", tree, rid) for rid in gone])
        used = {node.branch for node in (await self._nodes(tree, tenant)).values()}
        for branch in {node.branch: None for node in gone.values() if node.branch not in used}:
            await self._journal.delete_objects(tenant, [f"head/{branch}"])
            with suppress(SessionNotFound):
                await self._gateway.control.release(branch, tenant)


def _key(kind: str, *names: str) -> str:
    """Names are the clients': a slash in one must not look like a path."""
    return "/".join((kind, *(quote(name, safe="") for name in names)))


def _keep_len(parent: Node | None, params: SessionParams) -> int:
    if parent is None:
        if params.offset or params.drop_previous_output:
            raise InvalidRequest("session_params: offset and drop_previous_output need the rid they refer to")
        return 0
    whole = parent.prompt_len if params.drop_previous_output else parent.end_len
    if not 0 <= (params.offset or 0) <= whole:
        raise InvalidRequest(f"session_params.offset: must be from 0 to {whole}, the length of {params.rid}")
    return params.offset or whole


def _after(rid: str | None, nodes: dict[str, Node]) -> dict[str, Node]:
    """All that goes on from a request, directly or not; from none: everything."""
    if rid is None:
        return nodes
    after: dict[str, Node] = {}
    frontier = [rid]
    while frontier:
        at = frontier.pop()
        for child, node in nodes.items():
            if node.parent == at and child not in after:
                after[child] = node
                frontier.append(child)
    return after
