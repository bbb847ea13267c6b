"""Undo: the machine that changed files restores them, as a call of its own."""

# The names of parameters are written as those of the node's `Undo`.
# ruff: noqa: N803

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import may_know_call
from farhand.gateway.calls.catalog import NATIVE_PREFIX, Catalog, read_arguments
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, new_call_id
from farhand.gateway.nodes.endpoints import read_endpoint
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.machine.files.files import Files
from farhand.machine.files.undo import undo
from farhand.machine.files.undo_log import UndoLog
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError
from farhand.protocol.names import NATIVE, join_tool
from farhand.store.objects.base import Objects
from farhand.store.objects.folder import FolderObjects
from farhand.store.tables.calls import CallRecord
from farhand.tools.preview import Preview
from farhand.tools.tool import CallContext, Tool, tool
from farhand.tools.undo import NAME, SPEC, Call, DryRun, undo_preview

# The tool of the gateway's own machine; calls on a node are undone by the node's tool.
OWN: Final = "undo"
TRANSFER: Final = "gsv__Transfer"


class Undo:
    """Undoes calls on the machine where they ran."""

    def __init__(
        self, gate: Gate, catalog: Catalog, node_registry: NodeRegistry, kept: UndoLog, local: Files, objects: Objects
    ) -> None:
        self._gate = gate
        self._catalog = catalog
        self._node_registry = node_registry
        self._kept = kept
        self._local = local
        self._objects = objects
        self._own = tool(
            self.undo, name=OWN, description=SPEC.description, capability=SPEC.capability, preview=self.preview
        )

    def tools(self) -> list[Tool]:
        """Return the tools to serve without offering them."""
        return [self._own]

    async def begin(
        self, call_id: str, principal: Principal, *, dry_run: bool = False, idempotency_key: str | None = None
    ) -> OpenCall:
        """Undo a call: see `Gate.begin`. Raises NotFound if there is no such call."""
        record = await self._gate.find(call_id)
        if record is None or not may_know_call(principal, record, self._changed_node(record)):
            raise NotFound(f"there is no call {call_id[:100]!r}; `farhand calls` lists them")
        if is_trial(record):
            raise NotFound(
                f"call {record.id} was a trial, which changes nothing until it is kept; what can be undone is the call "
                f"that kept it, which `farhand trial show {record.id}` names"
            )
        node_id = self._where(record) if record.ended_at is not None else None
        arguments = {"call": record.id, **({"dryRun": True} if dry_run else {})}
        call = ToolCall(
            id=new_call_id(),
            tool=OWN if node_id is None else join_tool(node_id, NAME),
            args=msgspec.Raw(msgspec.json.encode(arguments)),
            agent_id=record.agent_id,
        )
        return await self._gate.begin(
            call,
            principal=principal,
            own=self._own if node_id is None else None,
            idempotency_key=idempotency_key,
        )

    def _where(self, record: CallRecord) -> str | None:
        """Return the node that stores what a call changed; None for this machine, or if nothing is stored."""
        node_id = self._changed_node(record)
        node = self._node_registry.nodes.get(node_id or "")
        if node is None or (node.online and not self._catalog.serves_unlisted(node, SPEC)):
            return None
        return node_id

    def _changed_node(self, record: CallRecord) -> str | None:
        return self._written_to(record) if record.tool == TRANSFER else record.node_id

    def _written_to(self, record: CallRecord) -> str | None:
        """Return the destination node of a transfer."""
        try:
            arguments = read_arguments(record.args)
            end = read_endpoint(str(arguments["destination"]), "Destination", self._node_registry)
        except (ToolError, KeyError, TypeError):
            return None
        return None if end.node_id == NATIVE else end.node_id

    async def undo(self, call: Call, context: CallContext, dryRun: DryRun = False) -> dict[str, Any]:  # noqa: ARG002
        files = await self._files_changed_by(call)
        return await asyncio.to_thread(undo, files, self._kept, call, dry_run=dryRun)

    async def preview(self, call: str, dryRun: bool) -> Preview:  # noqa: ARG002
        files = await self._files_changed_by(call)
        return await asyncio.to_thread(undo_preview, files, self._kept, call)

    async def _files_changed_by(self, call: str) -> Files:
        """Return the file root in which a call of the gateway worked. Raises ToolError if it cannot be undone."""
        record = await self._gate.find(call)
        if record is None:
            raise NotFound(f"there is no call {call[:100]!r}; `farhand calls` lists them")
        if record.ended_at is None:
            raise Failed(f"call {call} has not ended; it can be undone once it has, or cancelled now")
        first = await self._first(record)
        node_id = self._changed_node(first)
        if node_id is not None:
            raise Failed(
                f"call {call} ({first.tool}) cannot be undone: node {node_id!r} keeps no old content. Only what the "
                "file tools of a Farhand node and of the gateway change is kept, not what a plug-in does"
            )
        return await asyncio.to_thread(self._files, first, call)

    async def _first(self, record: CallRecord) -> CallRecord:
        """Return the original call of an undo, or of an undo of an undo."""
        seen = set()
        while record.tool == OWN and record.id not in seen:
            seen.add(record.id)
            arguments = read_arguments(record.args)
            before = await self._gate.find(str(arguments.get("call")) if isinstance(arguments, dict) else "")
            if before is None:
                break
            record = before
        return record

    def _files(self, record: CallRecord, call: str) -> Files:
        """Return the file root in which the call worked, with its path rules."""
        if not record.tool.startswith(NATIVE_PREFIX):
            return self._local
        if not isinstance(self._objects, FolderObjects):
            raise Failed(
                f"call {record.id} cannot be undone: the workspace lies in a bucket, where old content is not kept; "
                "the bucket's own versions may have it"
            )
        found = self._kept.find(call)
        path = next((file.name for file in found.files), None) if found is not None else None
        return self._local if path is None else self._objects.files_of(path)


def is_trial(record: CallRecord) -> bool:
    """Whether a call ran a command as a trial, which changes nothing until it is kept."""
    try:
        arguments = read_arguments(record.args)
        result = None if record.result is None else msgspec.json.decode(record.result)
    except (InvalidArgs, msgspec.MsgspecError):
        return False
    tried = isinstance(arguments, dict) and arguments.get("trial") is True
    return tried and isinstance(result, dict) and result.get("trialId") == record.id
