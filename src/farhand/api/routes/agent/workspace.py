"""The agents' files and skills over HTTP: raw bytes with their content type, folders as JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from email.utils import formatdate
from functools import partial
from typing import Any

from farhand.api.server.conditional import not_modified, not_modified_reply, requested_range
from farhand.api.server.http import Problem, Reply, Request, refusing
from farhand.api.server.router import JSON, PARTIAL, Query, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import Gate
from farhand.gateway.journal import EventJournal
from farhand.gateway.workspace.skills import Skills
from farhand.gateway.workspace.workspace import Workspace, clean
from farhand.protocol.errors import InvalidArgs
from farhand.store.objects.base import SKILLS, Conflict, InTheWay, ObjectInfo, ObjectReader, check_key

# A workspace file may come from an agent or a third party: opened in the browser, it must not act for the owner.
HARMLESS = (b"content-security-policy", b"sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:")
SKILL_FILE = "SKILL.md"
READ_FILE, WRITE_FILE, DELETE_FILE = "gsv__ReadFile", "gsv__WriteFile", "gsv__DeleteFile"
# Content types that clients send if they do not know the type.
UNTYPED = ("", "application/x-www-form-urlencoded")
read_route = partial(route, media=("*/*", JSON), also=PARTIAL, errors=(416, 500))
write_route = partial(route, takes="*/*", errors=(409, 412, 500), streams=True, content=True)
FILE = "/v1/workspace/{agent}/{path...}"
SKILL = "/v1/skills/{name}/{path...}"


class WorkspaceRoutes:
    """Paths have the same meaning as in the native tools, including `skills/`."""

    def __init__(self, journal: EventJournal, workspace: Workspace, skills: Skills, gate: Gate) -> None:
        self._journal = journal
        self._gate = gate
        self._workspace = workspace
        self._objects = workspace.objects
        self._skills = skills

    @read_route("GET /v1/workspace/{agent}", Scope.TOOLS_READ, "The files of an agent.")
    @read_route(f"GET {FILE}", Scope.TOOLS_READ, "A file of an agent as it is, or a folder as JSON.")
    async def read(self, request: Request) -> Reply | dict[str, Any]:
        agent, path = request.params["agent"], request.params.get("path", "")
        self._check_policy(request, READ_FILE, path=path or "/")
        found = await self._workspace.find(agent, path)
        if found is None:
            folder = await self._workspace.folder(agent, path)
            await self._gate.charge_route(request.principal)
            if folder is None:
                raise Problem(404, "not_found", f"Not found: {path[:200]}")
            return {"path": clean(path), "files": folder.files, "directories": folder.directories}
        wanted = requested_range(request, found.info.etag)
        offset, length = (0, found.info.size) if wanted is None else wanted.within(found.info.size)
        unchanged = not_modified(request, found.info.etag)
        await self._gate.charge_route(request.principal, 0 if unchanged or request.method == "HEAD" else length)
        if unchanged:
            return not_modified_reply(_headers(found.info))
        if request.method == "HEAD":
            return Reply(content_type=_type(found.info), headers=_headers(found.info), pieces=_nothing(), bare=True)
        reader = await self._objects.open_read(found.info.key, offset)
        if wanted is not None and reader.info.etag != found.info.etag:  # replaced since: the whole new file
            await reader.close()
            wanted, reader = None, await self._objects.open_read(found.info.key)
        headers = _headers(reader.info)
        if wanted is None:
            return Reply(content_type=_type(reader.info), headers=headers, pieces=_pieces(reader), bare=True)
        part = b"bytes %d-%d/%d" % (offset, offset + length - 1, reader.info.size)
        headers = [(b"content-length", b"%d" % length), (b"content-range", part), *headers[1:]]
        pieces = _pieces(reader, length)
        return Reply(status=206, content_type=_type(reader.info), headers=headers, pieces=pieces, bare=True)

    @write_route(f"PUT {FILE}", Scope.TOOLS_WRITE, "Write a file of an agent.", acts=True)
    async def write(self, request: Request) -> dict[str, Any]:
        path = request.params["path"]
        self._check_policy(request, WRITE_FILE, path=path, content="")
        key = self._workspace.writable_key(request.params["agent"], path)
        info = await self._store(request, key)
        return {"path": clean(path), "size": info.size, "written": True, "etag": info.etag}

    @route(f"DELETE {FILE}", Scope.TOOLS_WRITE, "Delete a file of an agent.", errors=(412, 500), acts=True)
    async def delete(self, request: Request) -> dict[str, Any]:
        path = request.params["path"]
        self._check_policy(request, DELETE_FILE, path=path)
        await self._gate.charge_route(request.principal)
        key = self._workspace.writable_key(request.params["agent"], path)
        await self._remove(request, key, path)
        return {"path": clean(path), "deleted": True}

    def _check_policy(self, request: Request, tool: str, **args: str) -> None:
        self._gate.check_route(request.principal, tool, args, request.params["agent"])

    # -- skills -----------------------------------------------------------------------------------------

    @route(
        "GET /v1/skills",
        Scope.READ,
        "The skills, as an agent would find them.",
        query=(Query("agent", "The agent; `main` by default."),),
        errors=(404, 500),
    )
    async def skills(self, request: Request) -> dict[str, Any]:
        skills = await self._skills.all(request.query("agent"))
        return {"skills": skills, "count": len(skills)}

    @route(
        "GET /v1/skills/{name}",
        Scope.READ,
        "The files of a global skill, or of an agent's own.",
        query=(Query("agent", "The agent whose own skill it is; by default, a global one."),),
        errors=(500,),
    )
    async def skill_files(self, request: Request) -> dict[str, Any]:
        name, agent = request.params["name"], request.query("agent")
        prefix = f"{SKILLS}/{clean(name)}/"
        self._gate.check_route(request.principal, READ_FILE, {"path": prefix}, agent)
        if agent is not None:
            prefix = self._workspace.key(agent, f"{prefix}{SKILL_FILE}").removesuffix(SKILL_FILE)
        files = [key.removeprefix(prefix) async for key in self._keys(prefix)]
        if not files:
            raise _no_skill(name)
        return {"name": name, "files": files, "count": len(files)}

    async def _keys(self, prefix: str) -> AsyncGenerator[str, None]:
        after: str | None = None
        while True:
            page = await self._objects.list(prefix, after=after)
            for info in page.objects:
                yield info.key
            after = page.after
            if after is None:
                return

    @write_route(f"PUT {SKILL}", Scope.ADMIN, "Write a file of a global skill.")
    async def write_skill(self, request: Request) -> dict[str, Any]:
        key = _skill_key(request)
        info = await self._store(request, key)
        _, name, inner = key.split("/", 2)
        if inner == SKILL_FILE:  # `farhand skills add` sends it last
            await self._skills.refresh(name)
        return {"path": key, "size": info.size, "written": True, "etag": info.etag}

    @route(f"DELETE {SKILL}", Scope.ADMIN, "Delete a file of a global skill.", errors=(412, 500))
    async def delete_skill_file(self, request: Request) -> dict[str, Any]:
        key = _skill_key(request)
        await self._remove(request, key, key)
        await self._skills.refresh(key.split("/", 2)[1])
        return {"path": key, "deleted": True}

    @route("DELETE /v1/skills/{name}", Scope.ADMIN, "Delete a global skill.", errors=(500,))
    async def delete_skill(self, request: Request) -> dict[str, Any]:
        name = request.params["name"]
        count = 0
        async for key in self._keys(f"{SKILLS}/{clean(name)}/"):
            count += await self._objects.delete(key)
        if not count:
            raise _no_skill(name)
        self._journal.note("skill.deleted", name, {"objects": count, "credential": request.credential.id})
        await self._skills.refresh(clean(name))
        return {"name": name, "deleted": True, "objects": count}

    async def _remove(self, request: Request, key: str, path: str) -> None:
        """Remove a file. Raises Problem; 404 if it does not exist."""
        with refusing(Conflict, status=412, code="precondition_failed"):
            known = await self._objects.delete(key, if_match=await self._matching(request, key))
        if not known:
            raise Problem(404, "not_found", f"File not found: {path[:200]}")
        self._journal.note("object.deleted", key, {"credential": request.credential.id})

    async def _matching(self, request: Request, key: str) -> str | None:
        """Return the etag that a file must have; for `If-Match: *`, the current one. Raises Conflict if there is no
        file.
        """
        match = request.header(b"if-match")
        if match is None or match.strip() != "*":
            return None if match is None else match.strip().strip('"')
        info = await self._objects.head(key)
        if info is None:
            raise Conflict(f"there is no object {key!r}; nothing was changed")
        return info.etag

    async def _store(self, request: Request, key: str) -> ObjectInfo:
        """Store a body. Raises Problem, in which case nothing was written."""
        content_type = request.header(b"content-type") or ""
        kept = None if content_type.partition(";")[0].strip().lower() in UNTYPED else content_type
        absent = request.header(b"if-none-match")
        with (
            refusing(Conflict, status=412, code="precondition_failed"),
            refusing(InTheWay, status=409, code="conflict"),
        ):
            if kept is not None and not (kept.isprintable() and kept.isascii() and len(kept) <= 200):
                raise InvalidArgs(f"{kept[:100]!r} is not a content type")
            match = await self._matching(request, key)
            if match is not None or absent is not None:
                if absent not in (None, "*"):
                    raise InvalidArgs("If-None-Match takes * alone: the file must not exist yet")
                body = await request.body()
                await self._gate.charge_route(request.principal, len(body))
                info = await self._objects.put(
                    key, body, content_type=kept, if_absent=absent is not None, if_match=match
                )
            else:
                info = await self._stream_in(request, key, kept)
        self._journal.note("object.written", key, {"size": info.size, "credential": request.credential.id})
        return info

    async def _stream_in(self, request: Request, key: str, content_type: str | None) -> ObjectInfo:
        meter = await self._gate.charge_route(request.principal)
        writer = await self._objects.open_write(key, content_type)
        try:
            async for part in request.stream():
                await meter.add(len(part))
                await writer.write(part)
            return await writer.commit()
        finally:
            await writer.abort()
            await meter.close()


def _skill_key(request: Request) -> str:
    return check_key(f"{SKILLS}/{clean(request.params['name'])}/{clean(request.params['path'])}")


def _no_skill(name: str) -> Problem:
    return Problem(404, "not_found", f"there is no such skill: {name[:100]!r}; `farhand skills` lists them")


def _type(info: ObjectInfo) -> bytes:
    kind = info.content_type or "application/octet-stream"
    # All text stored here is UTF-8; a browser would guess otherwise.
    return (f"{kind}; charset=utf-8" if kind.startswith("text/") and ";" not in kind else kind).encode()


def _headers(info: ObjectInfo) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-length", b"%d" % info.size),
        (b"accept-ranges", b"bytes"),
        (b"etag", f'"{info.etag}"'.encode()),
        (b"last-modified", formatdate(info.modified_at / 1000, usegmt=True).encode()),
        HARMLESS,
    ]


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield b""


async def _pieces(reader: ObjectReader, length: int | None = None) -> AsyncGenerator[bytes, None]:
    """Yield the rest of the reader, at most `length` bytes."""
    try:
        while length != 0 and (piece := await reader.read()):
            if length is not None:
                piece = piece[:length]
                length -= len(piece)
            yield piece
    finally:
        await reader.close()
