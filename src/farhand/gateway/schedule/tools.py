"""Implement `gsv__Cron` and `cron`, two interfaces to the jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from farhand.gateway.access.principal import Principal, principal_of, readable_owner
from farhand.gateway.calls.pinning import Pin
from farhand.gateway.calls.policy_subject import handed_on
from farhand.gateway.schedule.job_input import JOB_FIELDS
from farhand.gateway.schedule.jobs import CronJobs
from farhand.gateway.schedule.scheduler import clock
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.names import MAIN_AGENT
from farhand.store.tables.cron import At, CallSpec, Cron, SystemEvent, Task
from farhand.tools.preview import Preview
from farhand.tools.tool import CallContext, Tool

ACTIONS: Final = ("status", "list", "add", "update", "remove", "run", "runs")
NAME_CHARACTERS: Final = 60
# Longer than the maximum wait for a run.
TIMEOUT_MS: Final = 270_000

_SCHEDULE: Final = {
    "type": "object",
    "description": (
        'When. {"kind":"at","at":"2026-03-01T09:00" | "in 2 hours" | "tomorrow 9am"}, '
        '{"kind":"every","everyMinutes"|"everyHours"|"everyDays":N,"anchor"?:datetime}, or '
        '{"kind":"cron","expr":"0 9 * * MON-FRI","tz"?:"Europe/Berlin"}. Times without a zone are the user\'s.'
    ),
    "properties": {
        "kind": {"type": "string", "enum": ["at", "every", "cron"]},
        "at": {"type": "string", "description": "ISO datetime, 'in 2 hours', 'today 17:30', 'tomorrow 9am'."},
        "in": {"type": "string", "description": "Relative, e.g. 'in 30 minutes'."},
        "everyMinutes": {"type": "number"},
        "everyHours": {"type": "number"},
        "everyDays": {"type": "number"},
        "anchor": {"type": "string", "description": "Datetime the interval is counted from. Default: now."},
        "expr": {"type": "string", "description": "Cron expression of 5 fields; names such as MON or JAN are fine."},
        "tz": {"type": "string", "description": "IANA time zone. Default: the user's."},
    },
    "required": ["kind"],
}
_SPEC: Final = {
    "type": "object",
    "description": (
        '{"mode":"systemEvent","text"} puts text into the agent\'s main session; {"mode":"task","message",…} runs '
        'a turn in a clean session and delivers the reply; {"mode":"call","tool":"nas__Bash","args":{…}} calls a tool '
        "without a model."
    ),
    "properties": {
        "mode": {"type": "string", "enum": ["systemEvent", "task", "call"]},
        "text": {"type": "string"},
        "message": {"type": "string"},
        "deliver": {"type": "boolean"},
        "channel": {"type": "string"},
        "to": {"type": "string"},
        "model": {"type": "string"},
        "thinking": {"type": "string"},
        "timeoutSeconds": {"type": "number"},
        "tool": {"type": "string"},
        "args": {"type": "object"},
        "bestEffortDeliver": {"type": "boolean"},
    },
    "required": ["mode"],
}
_JOB: Final = {
    "name": {"type": "string"},
    "schedule": _SCHEDULE,
    "spec": _SPEC,
    "agentId": {"type": "string", "description": "Agent that owns the job. Default: main."},
    "description": {"type": "string"},
    "enabled": {"type": "boolean"},
    "deleteAfterRun": {"type": "boolean", "description": "Delete the job after a successful one-shot run."},
    "missed": {
        "type": "string",
        "enum": ["skip", "once", "all", "window"],
        "description": "What to do about slots that passed unrun. Default: once.",
    },
    "windowSeconds": {"type": "number", "description": "For missed=window: how old a slot may be."},
    "retries": {"type": "integer", "description": "How often a failed run is tried again."},
    "retryDelaySeconds": {"type": "number"},
    "node": {"type": "string", "description": "Run when this node is connected, and reach no other."},
    "tag": {"type": "string", "description": "Run when a node with this tag is connected, and reach no other."},
}
_NATIVE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "action": {"type": "string", "enum": list(ACTIONS)},
        "id": {"type": "string", "description": "Job id; for update, remove, and run with mode force."},
        "mode": {"type": "string", "enum": ["due", "force"], "description": "For run."},
        "agentId": {"type": "string", "description": "Filter for list and status; owner for add."},
        "includeDisabled": {"type": "boolean", "description": "For list."},
        "limit": {"type": "number"},
        "offset": {"type": "number"},
        "job": {
            "type": "object",
            "properties": _JOB,
            "required": ["name", "schedule", "spec"],
            "additionalProperties": False,
        },
        "patch": {"type": "object", "description": "For update: the fields of a job to change."},
        "jobId": {"type": "string", "description": "Filter for runs."},
        "waitSeconds": {"type": "number", "description": "For run: how long to wait for the end. Default: 60."},
    },
    "required": ["action"],
    "additionalProperties": False,
}
_PLAIN: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "action": {"type": "string", "enum": ["list", "add", "remove"]},
        "schedule": {
            "type": "string",
            "description": "Cron expression, 'every 30 minutes', 'every monday at 9', or 'tomorrow 9am'.",
        },
        "prompt": {"type": "string", "description": "Message that wakes the agent."},
        "id": {"type": "string", "description": "For remove."},
    },
    "required": ["action"],
    "additionalProperties": False,
}
_NATIVE_SPEC: Final = ToolSpec(
    name="gsv__Cron",
    description="Manage scheduled jobs: status, list, add, update, remove, run, and runs (the history).",
    parameters=_NATIVE,
    timeout_ms=TIMEOUT_MS,
)
_PLAIN_SPEC: Final = ToolSpec(
    name="cron",
    description="Schedule recurring tasks: list jobs, add one (schedule and prompt), remove one by id.",
    parameters=_PLAIN,
)
# The fields of a job may also be given next to `action: add`.
_FLAT: Final = tuple(name for name in JOB_FIELDS if name not in _NATIVE["properties"])


def cron_tools(book: CronJobs, find_pin: Callable[[str | None, Principal], Pin | None]) -> list[Tool]:
    """Return the schedule tools; `find_pin` returns what the work that makes a call is pinned to."""

    def pin_of(context: CallContext) -> Pin | None:
        return find_pin(context.session_key, principal_of(context))

    async def native(arguments: Mapping[str, Any], context: CallContext) -> Any:
        return await act(book, arguments, context, pin_of(context))

    async def plain(arguments: Mapping[str, Any], context: CallContext) -> Any:
        return {"content": await _plain(book, arguments, context, pin_of(context))}

    async def preview_native(arguments: Mapping[str, Any], context: CallContext) -> Preview:
        action = (_text(arguments, "action") or "").strip().lower()
        pin = pin_of(context)
        if action == "add":
            agent_id = _text(arguments, "agentId") or context.agent_id
            return _preview_added(book, _alike(pin, _job(arguments)), agent_id)
        job_id = _text(arguments, "id")
        if action in ("update", "remove", "run") and job_id is not None:
            return await _preview_job(book, action, job_id, arguments.get("patch"))
        return Preview()

    async def preview_plain(arguments: Mapping[str, Any], context: CallContext) -> Preview:
        action = _text(arguments, "action")
        if action == "add":
            return _preview_added(book, _alike(pin_of(context), _prompted(arguments)), context.agent_id)
        job_id = _text(arguments, "id")
        return await _preview_job(book, action, job_id) if action == "remove" and job_id else Preview()

    return [
        Tool(
            _NATIVE_SPEC.name,
            lambda: _NATIVE_SPEC,
            native,
            names=lambda: (*_NATIVE["properties"], *_FLAT),
            preview=preview_native,
            takes_handles=True,
        ),
        # `expression` is the parameter's former name.
        Tool(
            _PLAIN_SPEC.name,
            lambda: _PLAIN_SPEC,
            plain,
            aliases={"expression": "schedule"},
            preview=preview_plain,
            takes_handles=True,
        ),
    ]


async def act(book: CronJobs, arguments: Mapping[str, Any], context: CallContext, pin: Pin | None) -> dict[str, Any]:
    """Perform one action of `gsv__Cron`. Jobs made by a pinned run get the same pin. Raises ToolError."""
    action = _text(arguments, "action")
    if action is None:
        raise InvalidArgs(f"gsv__Cron parameter action is required: {', '.join(ACTIONS)}")
    job_id = _text(arguments, "id")
    agent_id = _text(arguments, "agentId")
    if action.strip().lower() != "add" and (flat := next((name for name in _FLAT if name in arguments), None)):
        raise InvalidArgs(f"parameter {flat!r} belongs to action 'add'; for 'update' put it into 'patch'")
    asker = principal_of(context).asker
    only = readable_owner(context)
    match action.strip().lower():
        case "status":
            return await book.status(agent_id)
        case "list":
            return await book.list(
                agent_id,
                include_disabled=_flag(arguments, "includeDisabled"),
                limit=_count(arguments, "limit"),
                offset=_count(arguments, "offset") or 0,
                own_to=only,
            )
        case "add":
            payload = _job(arguments)
            agent = agent_id or context.agent_id
            return await book.add(
                _alike(pin, payload), asker, agent, origins=handed_on(context.origins), by_agent=_agent(context)
            )
        case "update":
            patch = _object(arguments, "patch")
            if job_id is None:
                raise InvalidArgs("cron update requires id")
            if patch is None:
                raise InvalidArgs("cron update requires patch object")
            await _check_pin(pin, book, job_id, patch)
            return await book.update(job_id, patch, asker, origins=handed_on(context.origins), by_agent=_agent(context))
        case "remove":
            if job_id is None:
                raise InvalidArgs("cron remove requires id")
            await _check_pin(pin, book, job_id)
            return await book.remove(job_id, asker)
        case "run":
            wait = arguments.get("waitSeconds")
            if wait is not None and (isinstance(wait, bool) or not isinstance(wait, int | float)):
                raise InvalidArgs(f"parameter 'waitSeconds': expected a number, got {type(wait).__name__}")
            if job_id is not None:
                await _check_pin(pin, book, job_id)
            return await book.run(
                job_id, _text(arguments, "mode"), by=asker, wait=wait, session=context.session_key, own_to=only
            )
        case "runs":
            return await book.runs(
                _text(arguments, "jobId") or job_id,
                limit=_count(arguments, "limit"),
                offset=_count(arguments, "offset") or 0,
                own_to=only,
            )
    raise InvalidArgs(f"Unknown cron action: {action[:50]}; use {', '.join(ACTIONS)}")


def _agent(context: CallContext) -> str:
    """Return the agent that makes the call; empty if the caller acts for itself."""
    principal = principal_of(context)
    return "" if principal.on_behalf_of is None else principal.actor.id.partition(":")[2] or MAIN_AGENT


def _job(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the job to add: the object `job`, or fields next to `action`. Raises InvalidArgs if both are given."""
    payload = _object(arguments, "job")
    flat = {name: arguments[name] for name in _FLAT if name in arguments}
    if payload is not None and flat:
        raise InvalidArgs(f"the job's field {next(iter(flat))!r} is given beside 'job'; put it into 'job'")
    return flat if payload is None else payload


async def _plain(book: CronJobs, arguments: Mapping[str, Any], context: CallContext, pin: Pin | None) -> str:
    action = _text(arguments, "action")
    if not action:
        raise InvalidArgs("cron parameter action is required: list, add or remove")
    match action:
        case "list":
            listed = await book.list(include_disabled=False, limit=500, own_to=readable_owner(context))
            return msgspec.json.encode([_brief(job) for job in listed["jobs"]]).decode()
        case "add":
            job, maker = _alike(pin, _prompted(arguments)), principal_of(context).asker
            added = await book.add(
                job, maker, context.agent_id, origins=handed_on(context.origins), by_agent=_agent(context)
            )
            return msgspec.json.encode({"id": added["job"]["id"]}).decode()
        case "remove":
            job_id = _text(arguments, "id")
            if not job_id:
                raise InvalidArgs("cron parameter id is required")
            await _check_pin(pin, book, job_id)
            await book.remove(job_id, principal_of(context).asker)
            return f"removed cron job {job_id}"
    raise InvalidArgs(f"invalid action {action[:50]!r}: use list, add or remove")


def _prompted(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the job that `cron` adds. Raises InvalidArgs."""
    schedule = _text(arguments, "schedule")
    prompt = _text(arguments, "prompt")
    if not schedule:
        raise InvalidArgs("cron parameter schedule is required")
    if not prompt or not prompt.strip():
        raise InvalidArgs("cron parameter prompt is required")
    name = " ".join(prompt[: 10 * NAME_CHARACTERS].split())[:NAME_CHARACTERS]
    return {"name": name, "schedule": schedule, "spec": {"mode": "systemEvent", "text": prompt}}


def _preview_added(book: CronJobs, payload: Mapping[str, Any], agent_id: str | None) -> Preview:
    """Describe what `add` would do. Times are shown as given: relative ones count from when the call runs."""
    job = book.planned(payload, clock(), agent_id)
    rest = {name: value for name, value in payload.items() if name not in ("name", "agentId")}
    return Preview(summary=f"adds a job for agent {job.agent_id}: {job.name}\n{_json(rest)}")


async def _preview_job(book: CronJobs, action: str, job_id: str, patch: Any = None) -> Preview:
    job = await book.get(job_id)
    does = {"update": "changes", "remove": "removes", "run": "runs"}[action]
    changes = f"\n{_json(patch)}" if action == "update" else ""
    return Preview(summary=f"{does} the job {job_id} of agent {job['agentId']}: {job['name']}{changes}")


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _alike(pin: Pin | None, payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the job with the pin of the run that makes it. Raises NotAllowed."""
    if pin is None:
        return payload
    if not payload.get("node") and not payload.get("tag"):
        return {**payload, **msgspec.to_builtins(pin)}
    pin.check(payload)
    return payload


async def _check_pin(pin: Pin | None, book: CronJobs, job_id: str, patch: Mapping[str, Any] | None = None) -> None:
    """Raise NotAllowed if a pinned run uses a job with another pin, or gives it one; NotFound."""
    if pin is not None:
        job = await book.get(job_id)
        pin.check(job)
        pin.check({**job, **(patch or {})})


def _brief(job: dict[str, Any]) -> dict[str, Any]:
    schedule, spec = job["schedule"], job["spec"]
    expression = schedule.expr if isinstance(schedule, Cron) else job["scheduleHuman"]
    prompt = spec.text if isinstance(spec, SystemEvent) else spec.message if isinstance(spec, Task) else ""
    if isinstance(spec, CallSpec):
        prompt = f"{spec.tool} {msgspec.json.encode(spec.args).decode()}"
    view = {"id": job["id"], "expression": expression, "prompt": prompt, "next_run": job.get("nextRunHuman")}
    if "pausedReason" in job:
        view["paused_reason"] = job["pausedReason"]
    return view | ({"once": True} if isinstance(schedule, At) else {})


# -- arguments --------------------------------------------------------------------------------------------


def _text(arguments: Mapping[str, Any], name: str) -> str | None:
    value = arguments.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgs(f"parameter '{name}': expected text, got {type(value).__name__}")
    return value or None


def _flag(arguments: Mapping[str, Any], name: str) -> bool:
    value = arguments.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgs(f"parameter '{name}': expected true or false, got {type(value).__name__}")
    return bool(value)


def _count(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise InvalidArgs(f"parameter '{name}': expected a whole number, got {str(value)[:50]}")
    return int(value)


def _object(arguments: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = arguments.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgs(f"parameter '{name}': expected an object, got {type(value).__name__}")
    return value
