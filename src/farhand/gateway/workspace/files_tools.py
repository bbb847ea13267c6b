"""Implement `gsv__ReadFile`, `gsv__WriteFile`, `gsv__EditFile` and `gsv__DeleteFile` on an agent's files."""

# The reference fixes the parameter names, and the schema is derived from these signatures.
# ruff: noqa: N803

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from farhand.gateway.workspace.workspace import Found, Workspace
from farhand.machine.files.text import MOST_TEXT
from farhand.machine.time_zone import utc_text
from farhand.protocol.errors import Failed, InvalidArgs, NotFound
from farhand.store.objects.base import PLAIN, TEXT_TYPES, Conflict, ObjectInfo
from farhand.tools.preview import Preview, file_effect
from farhand.tools.schema import encode_argument
from farhand.tools.tool import CallContext, Tool, tool

ReadPath = Annotated[
    str | None,
    Meta(
        description='Path relative to the workspace root. Omit it or use "/" to list the root. '
        'Examples: "SOUL.md", "memory/", "skills/summarize/SKILL.md".'
    ),
]
FilePath = Annotated[str, Meta(description="File path relative to the workspace root.")]
Content = Annotated[str, Meta(description="Content to write.")]
OldString = Annotated[str, Meta(description="Exact text to find. Must not be empty.")]
NewString = Annotated[str, Meta(description="Replacement text.")]
ReplaceAll = Annotated[
    bool | None, Meta(description="Replace all occurrences. By default oldString must match exactly once.")
]


class _Edit(NamedTuple):
    """Describe an edit: the object to write, and the object it was read from."""

    key: str
    found: Found
    info: ObjectInfo
    before: bytes
    after: bytes
    replacements: int


class NativeFiles:
    """Provide the four file tools over the agents' workspaces."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def tools(self) -> list[Tool]:
        return [
            tool(self.read_file, name="gsv__ReadFile", read_only=True, capability="filesystem.read"),
            tool(self.write_file, name="gsv__WriteFile", capability="filesystem.write", preview=self.preview_write),
            tool(self.edit_file, name="gsv__EditFile", capability="filesystem.edit", preview=self.preview_edit),
            tool(self.delete_file, name="gsv__DeleteFile", capability="filesystem.write", preview=self.preview_delete),
        ]

    async def read_file(self, context: CallContext, path: ReadPath = None) -> dict[str, Any]:
        """Read a file or list a directory in the agent's workspace.

        Files under skills/ are the agent's own or, where it has none, the global ones.
        """
        asked = path or "/"
        found = await self._workspace.find(context.agent_id, asked)
        if found is None:
            folder = await self._workspace.folder(context.agent_id, asked)
            if folder is None:
                raise NotFound(f"Not found: {asked}")
            return {"path": asked, "files": folder.files, "directories": folder.directories}
        info, text = await self._text(found, asked)
        result = {
            "path": asked,
            "content": text,
            "size": info.size,
            "lastModified": utc_text(info.modified_at, "milliseconds"),
        }
        if found.source != "workspace":
            result |= {"resolvedPath": info.key, "resolvedSource": found.source}
        return result

    async def write_file(self, context: CallContext, path: FilePath, content: Content) -> dict[str, Any]:
        """Write or create a file in the agent's workspace.

        Directories are created as needed. What is written under skills/ is the agent's own copy.
        """
        key, data = self._workspace.writable_key(context.agent_id, path), encode_argument("content", content)
        info = await self._workspace.objects.put(key, data, content_type=_written_as(key))
        return {"path": path, "size": info.size, "written": True}

    async def preview_write(self, context: CallContext, path: str, content: str) -> Preview:
        key, data = self._workspace.writable_key(context.agent_id, path), encode_argument("content", content)
        return Preview(files=(file_effect(key, await self._own_content(key), data),))

    async def edit_file(
        self,
        context: CallContext,
        path: FilePath,
        oldString: OldString,
        newString: NewString,
        replaceAll: ReplaceAll = None,
    ) -> dict[str, Any]:
        """Edit a file in the agent's workspace by replacing exact text matches.

        An edit of a global skill goes into the agent's own copy.
        """
        edit = await self._edited(context, path, oldString, newString, replaceAll)
        inherited = edit.found.source == "global"
        try:
            await self._workspace.objects.put(
                edit.key,
                edit.after,
                content_type=edit.info.content_type,
                if_absent=inherited,
                if_match=None if inherited else edit.info.etag,
            )
        except Conflict:
            raise Failed(
                f"'{path}' was changed by someone else in the meantime, so nothing was written. "
                "Read it again and repeat the edit."
            ) from None
        return {
            "path": path,
            "replacements": edit.replacements,
            "edited": True,
            "resolvedSource": edit.found.source,
            "resolvedPath": edit.info.key,
        }

    async def preview_edit(
        self, context: CallContext, path: str, oldString: str, newString: str, replaceAll: bool | None
    ) -> Preview:
        edit = await self._edited(context, path, oldString, newString, replaceAll)
        if edit.found.source != "global":
            return Preview(files=(file_effect(edit.key, edit.before, edit.after),))
        diff = file_effect(edit.info.key, edit.before, edit.after).diff
        summary = f"makes a copy of {edit.info.key} for this agent, with this change:\n{diff}"
        return Preview(files=(file_effect(edit.key, None, edit.after),), summary=summary)

    async def _edited(
        self, context: CallContext, path: str, oldString: str, newString: str, replaceAll: bool | None
    ) -> _Edit:
        if not oldString:
            raise InvalidArgs("oldString must not be empty")
        old, new = encode_argument("oldString", oldString), encode_argument("newString", newString)
        key = self._workspace.writable_key(context.agent_id, path)
        found = await self._workspace.find(context.agent_id, path)
        if found is None:
            raise NotFound(f"File not found: {path}")
        info, text = await self._text(found, path)
        count = text.count(oldString)
        if count == 0:
            raise Failed(f"oldString not found in '{path}'")
        if count > 1 and not replaceAll:
            raise Failed(
                f"oldString found {count} times in '{path}'. Use replaceAll: true or provide a more specific oldString."
            )
        size = info.size + count * (len(new) - len(old))
        if size > MOST_TEXT:
            raise Failed(f"'{path}' would have {size} bytes, more than {MOST_TEXT}; nothing was written")
        return _Edit(key, found, info, text.encode(), text.replace(oldString, newString).encode(), count)

    async def delete_file(self, context: CallContext, path: FilePath) -> dict[str, Any]:
        """Delete a file from the agent's workspace, for good. Global skills cannot be deleted."""
        if not await self._workspace.objects.delete(self._workspace.writable_key(context.agent_id, path)):
            raise NotFound(f"File not found: {path}")
        return {"path": path, "deleted": True}

    async def preview_delete(self, context: CallContext, path: str) -> Preview:
        key = self._workspace.writable_key(context.agent_id, path)
        content = await self._own_content(key)
        if content is None:
            raise NotFound(f"File not found: {path}")
        return Preview(files=(file_effect(key, content, None),))

    async def _own_content(self, key: str) -> bytes | None:
        """Return an object's content, or None if it does not exist. Raises Failed if it is too large to show."""
        info = await self._workspace.objects.head(key)
        if info is None:
            return None
        if info.size > MOST_TEXT:
            raise Failed(f"{key} has {info.size} bytes, more than {MOST_TEXT}")
        return (await self._workspace.objects.get(key))[1]

    async def _text(self, found: Found, path: str) -> tuple[ObjectInfo, str]:
        """Return the object and its text. Raises Failed if it is not text or too large."""
        if found.info.size > MOST_TEXT:
            raise Failed(f"'{path}' has {found.info.size} bytes, more than {MOST_TEXT}; transfer it to a node instead")
        info, data = await self._workspace.objects.get(found.info.key)
        try:
            return info, data.decode()
        except UnicodeDecodeError:
            raise Failed(
                f"'{path}' is not text ({info.content_type}, {info.size} bytes); transfer it to a node instead"
            ) from None


def _written_as(key: str) -> str:
    """Return the content type for a file written by a tool: always a text type."""
    name = key.rpartition("/")[2]
    return TEXT_TYPES.get("." + name.rpartition(".")[2].lower(), PLAIN) if "." in name else PLAIN
