"""Undo of a run: everything it changed through file tools and kept trials, on all machines, newest first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog, read_arguments
from farhand.gateway.calls.gate import Gate
from farhand.gateway.control.undo import Undo, is_trial
from farhand.protocol.errors import InvalidArgs, NotFound, ToolError
from farhand.protocol.names import split_tool
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.store.ports import Store, Tx
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, CallState
from farhand.tools.trial import NAME as TRIAL

# Tools that run commands, whose changes are not recorded.
COMMANDS = frozenset(
    {"exec", "process", "shell"} | {tool.name for tool in NODE_TOOLS.values() if tool.listed and tool.runs_commands}
)
# How the machines say that a call was undone before, and that a file is not as the call left it.
_ALREADY = re.compile(r"was already undone, by call ([0-9a-f-]+)")
CHANGED = "was changed since the call"
NOT_RECORDED = "what a command changes is not recorded; run it as a trial to be able to undo it"


class UndoneCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of the run, and the result of undoing it."""

    call_id: str
    tool: str
    node_id: str | None
    undone: bool
    # What the undo did, or would do, with each file.
    files: list[Any] = []
    # Why it was not undone.
    reason: str = ""
    # The call that undid it, now or earlier.
    undone_by: str = ""
    # For a dry run: the newer call of the run that has to be undone before, as it will be.
    after: str = ""


class UndoneRun(msgspec.Struct, frozen=True):
    run_id: str
    dry_run: bool
    calls: list[UndoneCall]
    undone: int
    not_undone: int


class RunUndo:
    """Undoes runs, one call after the other, each by a call of its own."""

    def __init__(self, database: Store, gate: Gate, catalog: Catalog, undo: Undo) -> None:
        self._database = database
        self._gate = gate
        self._catalog = catalog
        self._undo = undo

    async def undo(self, run_id: str, principal: Principal, *, dry_run: bool = False) -> UndoneRun:
        """Undo what a run changed, newest first, and report every call that changed something or may have.

        Raises NotFound if no call of such a run is known.
        """
        if ":" in run_id or not run_id:
            raise InvalidArgs(f"{run_id[:100]!r} is not the id of a run")
        made, kept = await self._database.read(lambda store: _changes(store, run_id))
        if not made:
            raise NotFound(f"no call of a run {run_id[:100]!r} is recorded; `farhand log --kind run` shows runs")
        changing = [record for record in made.values() if self._may_change(record)]
        every = {record.id: record for record in (*changing, *kept)}
        newest = sorted(every.values(), key=lambda record: (record.created_at, record.id), reverse=True)
        found: list[UndoneCall] = []
        for record in newest:
            found.append(_planned(await self._undo_call(record, principal, dry_run), found, dry_run))
        undone = sum(one.undone for one in found)
        return UndoneRun(run_id, dry_run, found, undone, len(found) - undone)

    def _may_change(self, record: CallRecord) -> bool:
        if record.state is CallState.DENIED or is_trial(record):
            return False
        named = split_tool(record.tool)
        if record.node_id is not None and named is not None:
            declared = NODE_TOOLS.get(named[1])
            if declared is not None:
                return declared.changes
        own = self._catalog.own(record.tool)
        return own is None or not own.spec.read_only

    async def _undo_call(self, record: CallRecord, principal: Principal, dry_run: bool) -> UndoneCall:
        named = split_tool(record.tool)
        tool = named[1] if named else record.tool
        place = (record.id, record.tool, record.node_id)
        if tool in COMMANDS and not _is_kept(record):
            return UndoneCall(*place, False, reason=NOT_RECORDED)
        try:
            opened = await self._undo.begin(record.id, principal, dry_run=dry_run)
            ended = await self._gate.wait(opened)
        except ToolError as error:
            return UndoneCall(*place, False, reason=error.message)
        if ended.state is not CallState.OK or ended.result is None:
            reason = ended.error_message or f"the undo ended as {ended.state}"
            earlier = _ALREADY.search(reason)
            return UndoneCall(*place, earlier is not None, reason=reason, undone_by=earlier[1] if earlier else "")
        files = msgspec.json.decode(ended.result).get("files", [])
        return UndoneCall(*place, True, files=files, undone_by="" if dry_run else ended.id)


def _changes(tx: Tx, run_id: str) -> tuple[Mapping[str, CallRecord], list[CallRecord]]:
    """Return the calls that a run made, and those that kept one of its trials. Its sub-agents change nothing."""
    made = calls.made_by(tx, f"run:{run_id}:")
    if not made:
        return made, []
    about = {one.id: one for one in calls.about_trials(tx, min(record.created_at for record in made.values()))}
    tried = {record.id for record in made.values()}
    keeping: dict[str, list[CallRecord]] = {}
    for one in about.values():
        if (trial := _kept_trial(one)) in tried:
            keeping.setdefault(str(trial), []).append(one)
    return made, [kept for every in keeping.values() for kept in _applied(every, about)]


def _applied(every: list[CallRecord], about: Mapping[str, CallRecord]) -> list[CallRecord]:
    """Return the calls that applied a trial, or may have, of those that were to keep it."""
    for one in every:
        if one.state is CallState.OK:
            # A call that was lost may have applied what a later one found applied.
            return [about.get(_result(one).get("keptBy", ""), one)]
    return [one for one in every if one.state in (CallState.UNKNOWN, CallState.TIMEOUT)]


def _planned(one: UndoneCall, newer: list[UndoneCall], dry_run: bool) -> UndoneCall:
    """Return what a dry run says about a call whose file a newer call of the run changed, which is undone before."""
    if not dry_run or one.undone or CHANGED not in one.reason:
        return one
    for other in newer:
        paths = [str(file.get("path", "")) for file in other.files if isinstance(file, dict)]
        if other.undone and other.node_id == one.node_id and any(f"'{path}'" in one.reason for path in paths if path):
            return msgspec.structs.replace(one, undone=True, files=other.files, reason="", after=other.call_id)
    return one


def _is_kept(record: CallRecord) -> bool:
    """Whether a command was tried before it was approved: then its call kept the trial."""
    result = _result(record)
    return result.get("state") == "kept" and result.get("trialId") != record.id


def _result(record: CallRecord) -> dict[str, Any]:
    try:
        result = None if record.result is None else msgspec.json.decode(record.result)
    except msgspec.MsgspecError:
        return {}
    return result if isinstance(result, dict) else {}


def _kept_trial(record: CallRecord) -> str | None:
    """Return the trial that a call of `Trial` kept."""
    named = split_tool(record.tool)
    if record.tool != TRIAL.lower() and (named is None or named[1] != TRIAL):
        return None
    try:
        arguments = read_arguments(record.args)
    except InvalidArgs:
        return None
    kept = isinstance(arguments, dict) and arguments.get("action") == "keep"
    return str(arguments.get("trialId")) if kept else None
