"""SGLang's branching sessions: a request continues any earlier request, which it names by ``rid``.

Such a session is a tree of requests, and each branch is one Holdfast session. A request that continues
the whole of a branch's last request runs on that branch. Any other request starts a new branch with a
fork, which shares the pages up to the branching point. So no request cuts what another may continue.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from urllib.parse import quote, unquote

from pydantic import BaseModel

from holdfast.errors import InvalidRequest, SessionBusy, SessionExists, SessionNotFound
from router.core import RouterCore
from router.faces.fields import Int32, Name
from router.turns.sessions import Session
from router.turns.turn import TurnChunk, TurnRequest


class Node(BaseModel):
    """A completed request. Lengths count the whole sequence: without its output, and with it."""

    branch: str
    parent: str | None
    prompt_len: int
    end_len: int


class SessionParams(BaseModel):
    """``session_params`` of a request, as SGLang documents them."""

    id: Name | None = None
    rid: Name | None = None
    """The request to continue; None: an empty context."""
    offset: Int32 | None = None
    """How many tokens of that request's sequence to keep; less than 0: to drop from its end; None or 0: all are kept.
    As SGLang's, it means nothing without a request to continue."""
    replace: bool | None = None
    """Drop the requests that continued it before."""
    drop_previous_output: bool | None = None


class _BranchTaken(InvalidRequest):
    """Another request continued this branch first."""


class BranchingSessions:
    """Trees of requests, stored in the journal."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._journal = core.journal

    async def open(self, session_id: str, tenant: str) -> None:
        await self._core.control.open_session(session_id, tenant)
        await self._journal.put_objects(tenant, {_key("tree", session_id): b""})

    async def has(self, session_id: str, tenant: str) -> bool:
        """Whether the session is a branching one."""
        return await self._journal.get_object(tenant, _key("tree", session_id)) is not None

    async def close(self, session_id: str, tenant: str) -> None:
        """Release every branch. Raises SessionNotFound."""
        await self._forget(session_id, tenant, await self._nodes(session_id, tenant))
        await self._core.control.release(session_id, tenant)
        await self._journal.delete_objects(tenant, [_key("tree", session_id)])

    async def run(
        self, request: TurnRequest, params: SessionParams, ids_after: Callable[[int], Awaitable[array[int]]]
    ) -> AsyncGenerator[TurnChunk, None]:
        """Run a request of the tree. ``ids_after`` returns its input, given the number of tokens before it.

        Raises InvalidRequest for a ``rid`` that is unknown or not completed, or an ``offset`` past its end.
        """
        assert params.id is not None
        tree, tenant, own_branch = params.id, request.tenant, f"{params.id}/{request.turn_id}"
        parent = await self._parent(tree, tenant, params)
        keep_len = _keep_len(parent, params)
        continues = parent is not None and keep_len == parent.end_len
        request.session_id = parent.branch if parent is not None and continues else own_branch
        if parent is not None and not continues:
            await self._branch(parent, tenant, own_branch, keep_len)

        async def prepare(session: Session | None) -> tuple[int, array[int]]:
            if continues and request.session_id != own_branch and not params.replace:
                head = await self._journal.get_object(tenant, f"head/{request.session_id}")
                if head != (params.rid or "").encode():
                    raise _BranchTaken("another request has continued the branch")
            return keep_len, await ids_after(keep_len)

        request.prepare = prepare
        try:
            async for chunk in self._storing(tree, request, params.rid):
                yield chunk
        except (_BranchTaken, SessionBusy):
            if parent is None or request.session_id == own_branch:
                raise
            await self._branch(parent, tenant, own_branch, keep_len)
            request.session_id = own_branch
            async for chunk in self._storing(tree, request, params.rid):
                yield chunk

    async def _storing(self, tree: str, request: TurnRequest, parent: str | None) -> AsyncGenerator[TurnChunk, None]:
        stream = self._core.gateway.run(request)
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
            await stream.aclose()

    async def _parent(self, tree: str, tenant: str, params: SessionParams) -> Node | None:
        nodes = await self._nodes(tree, tenant) if params.replace else {}
        if params.replace:
            await self._forget(tree, tenant, _after(params.rid, nodes))
        if params.rid is None:
            return None
        found = await self._journal.get_object(tenant, _key("node", tree, params.rid))
        if found is None:
            raise InvalidRequest(
                f"session_params.rid: session {tree} has no completed request {params.rid}", "session_params.rid"
            )
        return Node.model_validate_json(found)

    async def _branch(self, parent: Node, tenant: str, branch: str, at_len: int) -> None:
        with suppress(SessionExists):  # a retry
            await self._core.control.fork(parent.branch, tenant, branch, at_len)

    async def _nodes(self, tree: str, tenant: str) -> dict[str, Node]:
        found = await self._journal.list_objects(tenant, _key("node", tree, ""))
        return {unquote(key.rpartition("/")[2]): Node.model_validate_json(value) for key, value in found}

    async def _forget(self, tree: str, tenant: str, gone: dict[str, Node]) -> None:
        """Delete requests, and release the branches that have none left."""
        if not gone:
            return
        await self._journal.delete_objects(tenant, [_key("node", tree, rid) for rid in gone])
        used = {node.branch for node in (await self._nodes(tree, tenant)).values()}
        for branch in {node.branch: None for node in gone.values() if node.branch not in used}:
            await self._journal.delete_objects(tenant, [f"head/{branch}"])
            with suppress(SessionNotFound):
                await self._core.control.release(branch, tenant)


def _key(kind: str, *names: str) -> str:
    """A key. Names are chosen by clients, so slashes in them are quoted."""
    return "/".join((kind, *(quote(name, safe="") for name in names)))


def _keep_len(parent: Node | None, params: SessionParams) -> int:
    if parent is None:
        return 0
    whole = parent.prompt_len if params.drop_previous_output else parent.end_len
    offset = params.offset or 0
    if not -whole <= offset <= whole:
        raise InvalidRequest(
            f"session_params.offset: must be from {-whole} to {whole}, the length of {params.rid}",
            "session_params.offset",
        )
    return offset if offset > 0 else whole + offset


def _after(rid: str | None, nodes: dict[str, Node]) -> dict[str, Node]:
    """All requests that continue ``rid``, directly or not; for None, all requests."""
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
