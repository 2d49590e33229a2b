"""``/v1/files``: the inputs and outputs of batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, UploadFile
from starlette.responses import StreamingResponse

from holdfast.errors import InvalidRequest, RequestTooLarge
from router.batches.files import KEEP_S, PIECE_BYTES, StoredFile
from router.core import RouterCore
from router.faces.http import Tenant
from router.faces.openai.pages import page_of

MULTIPART_BYTES = 64 * 1024
"""What a form adds to the file in it."""
MIN_KEEP_S, MAX_PAGE = 3600, 10_000
KeepSeconds = Annotated[int, Form(alias="expires_after[seconds]", ge=MIN_KEEP_S, le=KEEP_S)]
Anchor = Annotated[Literal["created_at"], Form(alias="expires_after[anchor]")]


def file_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router's files."""
    routes = APIRouter()
    files = core.files

    @routes.post("/v1/files")
    async def upload(
        tenant: Tenant,
        file: UploadFile,
        purpose: Annotated[str, Form()],
        anchor: Anchor = "created_at",
        keep_s: KeepSeconds = KEEP_S,
    ) -> StoredFile:
        if purpose != "batch":
            raise InvalidRequest("purpose: must be batch; files have no other use here", "purpose")
        if (file.size or 0) > core.config.max_file_bytes:
            raise RequestTooLarge(f"the file is larger than {core.config.max_file_bytes} bytes")
        return await files.create(tenant, file.filename or "", purpose, _pieces(file), keep_s)

    @routes.get("/v1/files")
    async def list_files(
        tenant: Tenant,
        purpose: str = "",
        limit: int = Query(MAX_PAGE, ge=1, le=MAX_PAGE),
        order: str = "desc",
        after: str = "",
    ) -> dict[str, Any]:
        known = [file.model_dump() for file in await files.list(tenant) if purpose in ("", file.purpose)]
        return page_of(known, limit, order, after)

    @routes.get("/v1/files/{file_id}")
    async def retrieve(tenant: Tenant, file_id: str) -> StoredFile:
        return await files.get(file_id, tenant)

    @routes.delete("/v1/files/{file_id}")
    async def delete(tenant: Tenant, file_id: str) -> dict[str, Any]:
        await files.delete(file_id, tenant)
        return {"id": file_id, "object": "file", "deleted": True}

    @routes.get("/v1/files/{file_id}/content")
    async def content(tenant: Tenant, file_id: str) -> StreamingResponse:
        file = await files.get(file_id, tenant)
        return StreamingResponse(files.content(file, tenant), media_type="application/octet-stream")

    return routes


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(PIECE_BYTES):
        yield piece
