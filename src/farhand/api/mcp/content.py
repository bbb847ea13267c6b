"""Resources, prompts and completion of MCP: workspace files, call records and output, and skills.

Files and skills are read by calls of the gateway's own tools through the gate, so rights, policy and record are those
of these tools.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec

from farhand.api.mcp import messages as rpc
from farhand.api.mcp.messages import RpcError, RpcMessage
from farhand.gateway.access.credentials import Scope
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import new_call_id, result_of
from farhand.gateway.calls.search import CallSearch
from farhand.gateway.nodes.output import RemoteCommands
from farhand.gateway.workspace.skills import Skill, Skills
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import ToolError
from farhand.protocol.names import MAIN_AGENT, NATIVE
from farhand.store.objects.base import content_type_of
from farhand.store.tables.calls import CallRecord

SCHEME: Final = "farhand://"
READ_FILE: Final = "gsv__ReadFile"
READ_SKILL: Final = "read"
ORIGIN: Final = ("mcp",)
RESOURCE_NOT_FOUND: Final = -32002
MAX_OUTPUT_BYTES: Final = 1024 * 1024
MAX_VALUES: Final = 100
TEMPLATES: Final = (
    {
        "uriTemplate": f"{SCHEME}workspace/{{agent}}/{{+path}}",
        "name": "workspace-file",
        "title": "File of an agent's workspace",
        "description": "The agent `main` has the default workspace. A path that ends with / lists a folder.",
    },
    {
        "uriTemplate": f"{SCHEME}calls/{{id}}",
        "name": "call",
        "title": "Record of a call",
        "description": "What was called, by whom, when, and how it ended.",
        "mimeType": "application/json",
    },
    {
        "uriTemplate": f"{SCHEME}calls/{{id}}/output",
        "name": "call-output",
        "title": "Output of a call's command",
        "description": "What the command of a call has printed so far, at most 1 MiB.",
        "mimeType": "text/plain",
    },
)


@dataclass(frozen=True)
class McpContent:
    """Answers the requests about resources, prompts and completion."""

    gate: Gate
    skills: Skills
    calls: CallSearch
    commands: RemoteCommands
    # Returns the ids of the agents.
    agents: Callable[[], Sequence[str]]

    async def answer(self, method: str, message: RpcMessage, principal: Principal, *, modern: bool) -> dict[str, Any]:
        """Return the result of a request. Raises RpcError."""
        match method:
            case "resources/list":
                return {"resources": await self._resources(principal)}
            case "resources/templates/list":
                return {"resourceTemplates": list(TEMPLATES)}
            case "resources/read":
                return {"contents": [await self._read(_text(message, "uri"), principal, modern=modern)]}
            case "prompts/list":
                return {"prompts": [_prompt(skill) for skill in await self._prompts(principal)]}
            case "prompts/get":
                return await self._get_prompt(message, principal)
            case "completion/complete":
                return {"completion": await self._complete(message, principal)}
        raise RpcError(rpc.METHOD_NOT_FOUND, f"there is no method {method[:100]!r} here")

    # -- resources --------------------------------------------------------------------------------------

    async def _resources(self, principal: Principal) -> list[dict[str, Any]]:
        """Return the files at the top of the default workspace, as far as the principal may read them."""
        try:
            found = await self._call(READ_FILE, {"path": "/"}, principal, MAIN_AGENT)
        except ToolError:
            return []
        names: list[str] = found.get("files", [])
        return [
            {"uri": f"{SCHEME}workspace/{MAIN_AGENT}/{quote(name)}", "name": name, "mimeType": content_type_of(name)}
            for name in names
        ]

    async def _read(self, uri: str, principal: Principal, *, modern: bool) -> dict[str, Any]:
        kind, _, rest = uri.removeprefix(SCHEME).partition("/")
        missing = RpcError(
            rpc.INVALID_PARAMS if modern else RESOURCE_NOT_FOUND, f"there is no resource {uri[:200]!r}", {"uri": uri}
        )
        if not uri.startswith(SCHEME) or not rest:
            raise missing
        try:
            if kind == "workspace":
                return await self._read_file(uri, rest, principal)
            if kind == "calls":
                return await self._read_call(uri, rest, principal)
        except ToolError as error:
            if error.kind.value == "not_found":
                raise missing from None
            raise RpcError(rpc.INVALID_PARAMS, f"{error.kind.value}: {error.message}", {"uri": uri}) from None
        raise missing

    async def _read_file(self, uri: str, rest: str, principal: Principal) -> dict[str, Any]:
        agent, _, path = rest.partition("/")
        found = await self._call(READ_FILE, {"path": unquote(path) or "/"}, principal, unquote(agent))
        if "content" in found:
            return {"uri": uri, "mimeType": content_type_of(unquote(path)), "text": found["content"]}
        return {"uri": uri, "mimeType": "application/json", "text": msgspec.json.encode(found).decode()}

    async def _read_call(self, uri: str, rest: str, principal: Principal) -> dict[str, Any]:
        call_id, _, part = rest.partition("/")
        record = await self.gate.find(unquote(call_id))
        if record is None or part not in ("", "output") or not _may_see(record, principal):
            raise RpcError(RESOURCE_NOT_FOUND, f"there is no resource {uri[:200]!r}", {"uri": uri})
        if part == "":
            text = msgspec.json.encode(record).decode()
            return {"uri": uri, "mimeType": "application/json", "text": text}
        if record.credential != principal.actor.id:
            self.gate.check_node(principal, record.node_id or NATIVE)
        data = b""
        of = {"call_id": record.id}
        meter = await self.gate.meter(principal)
        pages = self.commands.output(record.node_id or NATIVE, of, 0, wait=False)
        try:
            async for page in pages:
                await meter.add(len(page.data))
                data += page.data
                if len(data) >= MAX_OUTPUT_BYTES or page.over:
                    break
        finally:
            await pages.aclose()
            await meter.close()
        try:
            return {"uri": uri, "mimeType": "text/plain", "text": data[:MAX_OUTPUT_BYTES].decode()}
        except UnicodeDecodeError:
            blob = base64.b64encode(data[:MAX_OUTPUT_BYTES]).decode()
            return {"uri": uri, "mimeType": "application/octet-stream", "blob": blob}

    # -- prompts ----------------------------------------------------------------------------------------

    async def _prompts(self, principal: Principal) -> list[Skill]:
        if principal.narrowed or not principal.may(Scope.TOOLS_READ):
            return []
        return [skill for skill in await self.skills.all(MAIN_AGENT) if skill.eligible]

    async def _get_prompt(self, message: RpcMessage, principal: Principal) -> dict[str, Any]:
        name, arguments = _text(message, "name"), message.value("arguments")
        skill = next((one for one in await self._prompts(principal) if one.name == name), None)
        if skill is None:
            raise RpcError(rpc.INVALID_PARAMS, f"there is no prompt {name[:100]!r}")
        task = arguments.get("task") if isinstance(arguments, dict) else None
        if not isinstance(task, str | None):
            raise RpcError(rpc.INVALID_PARAMS, "the argument task must be a text")
        try:
            if skill.file and skill.source == "local":
                text = (await self._call(READ_SKILL, {"path": skill.file}, principal, MAIN_AGENT))["content"]
            else:
                text = (await self._call(READ_FILE, {"path": skill.path}, principal, MAIN_AGENT))["content"]
        except ToolError as error:
            raise RpcError(rpc.INVALID_PARAMS, f"{error.kind.value}: {error.message}") from None
        text = f"{text}\n\nTask: {task}" if task else text
        return {
            "description": skill.description,
            "messages": [{"role": "user", "content": {"type": "text", "text": text}}],
        }

    # -- completion -------------------------------------------------------------------------------------

    async def _complete(self, message: RpcMessage, principal: Principal) -> dict[str, Any]:
        ref, argument = message.value("ref"), message.value("argument")
        match ref, argument:
            case {"type": "ref/prompt", "name": str()}, {"name": str(), "value": str()}:
                return _completion([])
            case {"type": "ref/resource", "uri": str(uri)}, {"name": str(name), "value": str(value)}:
                return _completion(await self._values(uri, name, value, message, principal))
        raise RpcError(rpc.INVALID_PARAMS, "completion needs ref, and argument with name and value")

    async def _values(self, uri: str, name: str, value: str, message: RpcMessage, principal: Principal) -> list[str]:
        if name == "agent" and "workspace" in uri:
            found = list(self.agents()) if principal.reaches(None, READ_FILE) else []
        elif name == "path" and "workspace" in uri:
            context = message.value("context")
            given = context.get("arguments") if isinstance(context, dict) else None
            agent = given.get("agent") if isinstance(given, dict) else None
            folder = value.rpartition("/")[0]
            try:
                listed = await self._call(
                    READ_FILE, {"path": folder or "/"}, principal, agent if isinstance(agent, str) else MAIN_AGENT
                )
            except ToolError:
                return []
            found = [*listed.get("files", []), *listed.get("directories", [])]
        elif name == "id" and "calls" in uri:
            records = await self.calls.search({"credential": principal.actor.id}, MAX_VALUES, bodies=False)
            found = [record.id for record in records]
        else:
            return []
        return [one for one in found if one.startswith(value)]

    async def _call(self, tool: str, args: dict[str, Any], principal: Principal, agent: str) -> dict[str, Any]:
        """Return the result of a gateway tool. Raises ToolError."""
        call = ToolCall(new_call_id(), tool, msgspec.Raw(msgspec.json.encode(args)), agent_id=agent)
        opened = await self.gate.begin(call, principal=principal, origins=ORIGIN)
        result = result_of(await self.gate.wait(opened))
        if result.error is not None:
            raise ToolError.of(result.error.kind, result.error.message)
        value: dict[str, Any] = msgspec.json.decode(result.result)
        return value


def _may_see(record: CallRecord, principal: Principal) -> bool:
    """Whether a principal may see a call: its own, or any with the scope `read`."""
    return record.credential == principal.actor.id or (not principal.narrowed and principal.may(Scope.READ))


def _prompt(skill: Skill) -> dict[str, Any]:
    task = {"name": "task", "description": "What to do with the skill.", "required": False}
    return {"name": skill.name, "description": skill.description, "arguments": [task]}


def _completion(values: list[str]) -> dict[str, Any]:
    return {"values": values[:MAX_VALUES], "total": len(values), "hasMore": len(values) > MAX_VALUES}


def _text(message: RpcMessage, name: str) -> str:
    value = message.value(name)
    if not isinstance(value, str):
        raise RpcError(rpc.INVALID_PARAMS, f"{name} is required")
    return value
