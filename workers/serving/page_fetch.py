"""Where one rank gets a session's pages from."""

from __future__ import annotations

from holdfast.errors import MigrationRefused
from holdfast.v1 import rank_pb2
from workers.serving.kv_transfer import RankThread, fetch_pages, unpack_columns
from workers.serving.page_copies import PageCopies
from workers.store.client import StoreUnavailable


async def fetch(owner: RankThread, copies: PageCopies | None, request: rank_pb2.FetchRequest) -> int:
    """Read pages into those that the log allocated for them. Returns the bytes.

    What the node's KV store has comes from there, the rest from the counterpart, if the request names one.
    Raises MigrationRefused (also if it names none and a copy is missing), DeadlineExceeded, NoWorkerAvailable.
    """
    num_bytes, missing = 0, unpack_columns(request.columns)
    if any(request.keys):
        if copies is not None:
            try:
                num_bytes, missing = await copies.load(request, missing)
            except StoreUnavailable:
                if not request.address:
                    raise
        if any(missing) and not request.address:
            raise MigrationRefused("not all copies are in this node's KV store, or one does not match its checksum")
    return num_bytes + (await fetch_pages(owner, request, missing) if any(missing) else 0)
