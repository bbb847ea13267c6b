"""The workspace as a transfer endpoint: objects of an agent, written whole or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator

from farhand.gateway.transfers.gateway_endpoints import OwnReceiver, OwnSender
from farhand.gateway.transfers.relay import Role
from farhand.gateway.transfers.transfers import OwnEnd
from farhand.gateway.workspace.workspace import Workspace
from farhand.machine.files import steering_files as steering
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound
from farhand.protocol.manifest import EntryKind, ManifestEntry
from farhand.protocol.messages import TransferOffer
from farhand.protocol.names import MAIN_AGENT
from farhand.store.objects.base import AGENTS, ObjectInfo, ObjectWriter, pages

# Maximum objects of one transfer: all are held open until the last has arrived, then put in place together.
MOST_OBJECTS = 256


def workspace_end(workspace: Workspace, agent_id: str | None, path: str, role: Role) -> OwnEnd:
    """Return the workspace endpoint for a role. Raises NotAllowed for a path of another agent."""
    relative = own_path(path, agent_id or MAIN_AGENT)
    return (_Sender if role == "send" else _Receiver)(workspace, agent_id, relative)


def own_path(path: str, agent_id: str) -> str:
    """Return a path relative to the agent's root. It may start with `agents/{its id}/` but not name another agent."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] != [AGENTS]:
        return path
    if len(parts) < 3 or parts[1] != agent_id:
        raise NotAllowed(f"'{path[:200]}' is not in the workspace of the agent {agent_id!r}")
    return "/".join(parts[2:]) + ("/" if path.endswith("/") else "")


class _Sender(OwnSender):
    def __init__(self, workspace: Workspace, agent_id: str | None, path: str) -> None:
        super().__init__()
        self._workspace = workspace
        self._agent_id = agent_id
        self._path = path
        self._found: dict[str, ObjectInfo] = {}

    async def describe(self) -> tuple[str, list[ManifestEntry], str | None]:
        name = self._path.rstrip("/").rpartition("/")[2]
        if not self._path.endswith("/"):
            found = await self._workspace.find(self._agent_id, self._path)
            if found is not None:
                self._found = {"": found.info}
                info = found.info
                return name, [ManifestEntry("", EntryKind.FILE, info.size, changed=info.modified_at)], info.content_type
        folder = self._path.strip("/")
        prefix = self._workspace.key(self._agent_id, f"{folder}/x")[:-1]
        entries = await self._beneath(prefix)
        if not entries:
            raise NotFound(f"file not found in the workspace: {self._path}")
        return name, entries, None

    async def _beneath(self, prefix: str) -> list[ManifestEntry]:
        entries: dict[str, ManifestEntry] = {}
        async for page in pages(self._workspace.objects, prefix):
            for info in page.objects:
                path = info.key[len(prefix) :]
                parts = path.split("/")
                for depth in range(1, len(parts)):
                    folder = "/".join(parts[:depth])
                    entries.setdefault(folder, ManifestEntry(folder, EntryKind.FOLDER))
                entries[path] = ManifestEntry(path, EntryKind.FILE, info.size, changed=info.modified_at)
                self._found[path] = info
        return list(entries.values())

    async def content(self, entry: ManifestEntry, offset: int) -> AsyncIterator[bytes]:
        info = self._found[entry.path]
        reader = await self._workspace.objects.open_read(info.key, offset)
        try:
            if reader.info.etag != info.etag:
                raise Failed(f"'{info.key}' was changed while it was transferred")
            while piece := await reader.read():
                yield piece
        finally:
            await reader.close()


class _Receiver(OwnReceiver):
    def __init__(self, workspace: Workspace, agent_id: str | None, path: str) -> None:
        super().__init__()
        self._workspace = workspace
        self._agent_id = agent_id
        self._path = path
        self._mime: str | None = None
        self._writers: list[ObjectWriter] = []
        # A transfer resumes after a restart without its caller; then it changes no steering files.
        self._may_steer = steering.allowed.get()

    async def accept(self, offer: TransferOffer) -> None:
        path = self._path
        if path.endswith("/") or await self._is_folder(path):
            if offer.name in ("", ".", "..") or "/" in offer.name:
                raise InvalidArgs("the source path does not end in a name; name the destination file itself")
            path = f"{path.rstrip('/')}/{offer.name}"
        if offer.files > MOST_OBJECTS:
            raise Failed(f"a transfer into the workspace has at most {MOST_OBJECTS} files, this one has {offer.files}")
        steering.allowed.set(self._may_steer)
        self._workspace.writable_key(self._agent_id, path)
        self._target = path
        binary = offer.mime is not None and not offer.mime.startswith("text/")
        self._mime = offer.mime if binary else None

    async def _is_folder(self, path: str) -> bool:
        if await self._workspace.find(self._agent_id, path) is not None:
            return False
        prefix = self._workspace.key(self._agent_id, f"{path.rstrip('/')}/x")[:-1]
        return bool((await self._workspace.objects.list(prefix, limit=1)).objects)

    async def begin_entry(self, entry: ManifestEntry) -> None:
        if entry.kind is EntryKind.FOLDER:
            return
        if entry.kind is EntryKind.LINK:
            raise Failed(f"the workspace keeps no links, and '{entry.path}' is one")
        path = f"{self._target}/{entry.path}" if entry.path else self._target
        steering.allowed.set(self._may_steer)
        key = self._workspace.writable_key(self._agent_id, path)
        self._writers.append(await self._workspace.objects.open_write(key, self._mime, held=bool(entry.path)))

    async def take(self, data: bytes) -> None:
        await self._writers[-1].write(data)

    async def finish(self) -> None:
        for writer in self._writers:
            await writer.commit()

    async def discard(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            await writer.abort()
