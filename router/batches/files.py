"""Files in the journal, in pieces, so that no write is long."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

from pydantic import BaseModel

from holdfast.errors import ResponseNotFound, TooManyFiles
from router.journal.interface import Fence, Journal

PIECE_BYTES = 256 * 1024
MAX_FILES_PER_TENANT = 1000
KEEP_S = 30 * 24 * 3600
"""How long a file is kept, unless its creator says otherwise: as long as OpenAI keeps a batch's."""
SYSTEM = "batches"
"""The tenant of what routers keep for themselves. A client's is "", or 16 hexadecimal digits."""


class StoredFile(BaseModel):
    """A file as the journal stores it, and as the API shows it."""

    id: str
    object: str = "file"
    bytes: int = 0
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "uploaded"
    """``processed`` once all of it is stored."""


class Files:
    """Stores, lists and reads files."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def create(
        self, tenant: str, filename: str, purpose: str, content: AsyncIterator[bytes], keep_s: int = KEEP_S
    ) -> StoredFile:
        """Store a file. Raises TooManyFiles."""
        known = len(await self.list(tenant))
        if known >= MAX_FILES_PER_TENANT:
            raise TooManyFiles(f"{known} of your files are stored, which is the limit; delete some")
        writer = self.writer(tenant, f"file-{uuid.uuid4().hex}", filename, purpose, keep_s)
        await writer.begin()
        async for data in content:
            await writer.write(data)
        return await writer.finish()

    def writer(
        self, tenant: str, file_id: str, filename: str, purpose: str, keep_s: int, fence: Fence | None = None
    ) -> FileWriter:
        """A writer of a new file."""
        now = int(time.time())
        file = StoredFile(id=file_id, created_at=now, expires_at=now + keep_s, filename=filename, purpose=purpose)
        return FileWriter(self._journal, tenant, file, fence)

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """Raises ResponseNotFound."""
        found = await self._journal.get_object(tenant, f"file/{file_id}")
        if found is None:
            raise ResponseNotFound(f"file {file_id} does not exist")
        return StoredFile.model_validate_json(found)

    async def list(self, tenant: str) -> list[StoredFile]:
        """All files, the oldest first."""
        found = await self._journal.list_objects(tenant, "file/")
        return sorted((StoredFile.model_validate_json(value) for _, value in found), key=lambda f: (f.created_at, f.id))

    async def content(self, file: StoredFile, tenant: str) -> AsyncIterator[bytes]:
        """The pieces of a file. Ends early if it is deleted meanwhile."""
        for number in range(-(-file.bytes // PIECE_BYTES)):
            piece = await self._journal.get_object(tenant, _piece_key(file.id, number))
            if piece is None:
                return
            yield piece

    async def delete(self, file_id: str, tenant: str) -> None:
        """Raises ResponseNotFound."""
        file = await self.get(file_id, tenant)
        await self._journal.delete_objects(tenant, [f"file/{file_id}"])
        number = 0
        while await self._journal.get_object(tenant, _piece_key(file_id, number)) is not None:
            await self._journal.delete_objects(tenant, [_piece_key(file_id, number)])
            number += 1
        await self._journal.delete_objects(SYSTEM, [_expiry_key(file, tenant)])

    async def delete_expired(self, now: float) -> None:
        """Delete the files of all tenants that have expired."""
        for key, _ in await self._journal.list_objects(SYSTEM, "expiring/"):
            _, expires_at, tenant, file_id = key.split("/")
            if int(expires_at) > now:
                return
            try:
                await self.delete(file_id, tenant)
            except ResponseNotFound:
                await self._journal.delete_objects(SYSTEM, [key])


class FileWriter:
    """Writes one file piece by piece. Each write is one of ``fence``, if there is one."""

    def __init__(self, journal: Journal, tenant: str, file: StoredFile, fence: Fence | None) -> None:
        self._journal = journal
        self._tenant = tenant
        self._fence = fence
        self._buffer = bytearray()
        self._num_pieces = 0
        self.file = file

    async def begin(self) -> None:
        """Make the file known before its content: what a dead router leaves is listed, and expires."""
        await self._journal.put_objects(SYSTEM, {_expiry_key(self.file, self._tenant): b""})
        await self._put({f"file/{self.file.id}": self.file.model_dump_json().encode()})

    async def write(self, data: bytes) -> None:
        """Append to the file."""
        self._buffer += data
        self.file.bytes += len(data)
        while len(self._buffer) >= PIECE_BYTES:
            await self._put_piece()

    async def finish(self) -> StoredFile:
        """The whole file is written."""
        if self._buffer:
            await self._put_piece()
        self.file.status = "processed"
        await self._put({f"file/{self.file.id}": self.file.model_dump_json().encode()})
        return self.file

    async def _put_piece(self) -> None:
        await self._put({_piece_key(self.file.id, self._num_pieces): bytes(self._buffer[:PIECE_BYTES])})
        del self._buffer[:PIECE_BYTES]
        self._num_pieces += 1

    async def _put(self, objects: dict[str, bytes]) -> None:
        await self._journal.put_objects(self._tenant, objects, self._fence)


def _piece_key(file_id: str, number: int) -> str:
    return f"file-piece/{file_id}/{number:08d}"


def _expiry_key(file: StoredFile, tenant: str) -> str:
    return f"expiring/{file.expires_at:012d}/{tenant}/{file.id}"
