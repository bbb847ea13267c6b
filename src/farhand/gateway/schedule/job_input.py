"""Parse callers' descriptions of jobs into `CronJob`. Raises InvalidArgs that names the invalid field."""

from __future__ import annotations

import difflib
import math
import re
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec

from farhand.gateway.schedule.phrases import read_phrase
from farhand.gateway.schedule.time_parsing import (
    LAST_MS,
    UNITS,
    check_expression,
    checked,
    in_words,
    next_slot,
    read_duration,
    read_moment,
    words_of,
    zone_named,
)
from farhand.gateway.sessions import keys as session_keys
from farhand.llm.model import THINKING_LEVELS
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.names import MAX_COMPARED_LENGTH, MAX_TOOL_NAME_CHARS, validate_node_id
from farhand.store.tables.cron import At, CallSpec, Cron, CronJob, Every, Schedule, Spec, SystemEvent, Task

# How far in the past a one-shot may be; it then fires at once.
PAST_MS: Final = 60_000
# Smaller numbers are seconds since 1970, larger ones milliseconds.
SECONDS_BEFORE: Final = 100_000_000_000
MIN_EVERY_MS: Final = 100
MAX_TEXT: Final = 100_000
MAX_NAME: Final = 200
MAX_RETRIES: Final = 10

JOB_FIELDS: Final = (
    "name", "schedule", "spec", "agentId", "description", "enabled", "deleteAfterRun", "missed", "windowSeconds",
    "retries", "retryDelaySeconds", "node", "tag",
)  # fmt: skip
AT_FIELDS: Final = (
    "kind", "tz", "at", "atMs", "in", "inMs", "delayMs", "inSeconds", "inMinutes", "inHours", "inDays", "when", "atIso",
)  # fmt: skip
EVERY_FIELDS: Final = (
    "kind", "tz", "everyMs", "everySeconds", "everyMinutes", "everyHours", "everyDays", "anchor", "anchorMs",
    "anchorAt", "startAt",
)  # fmt: skip
TASK_FIELDS: Final = (
    "mode", "message", "deliver", "channel", "to", "model", "thinking", "timeoutSeconds", "bestEffortDeliver",
)  # fmt: skip
MULTIPLES: Final = {
    "Ms": 1,
    "Seconds": UNITS["s"],
    "Minutes": UNITS["m"],
    "Hours": UNITS["h"],
    "Days": UNITS["d"],
}
_EVERY_TEXT = re.compile(r"every\s+(?:(\d.*)|([a-z]+))")


# -- jobs -------------------------------------------------------------------------------------------------


def read_job(payload: Mapping[str, Any], now: int, zone: ZoneInfo, agent_id: str = "main") -> CronJob:
    """Return a new job. `agent_id` owns it unless the payload names an agent."""
    if any(payload.get(field) is None for field in ("name", "schedule", "spec")):
        missing = next(field for field in ("name", "schedule", "spec") if payload.get(field) is None)
        raise InvalidArgs(f"cron add requires name, schedule, and spec; {missing} is missing")
    _known_fields("job", payload, JOB_FIELDS)
    schedule = read_schedule(payload["schedule"], now, zone)
    job = CronJob(
        id=str(uuid.uuid4()),
        agent_id=session_keys.agent_id(agent_id),
        name="",
        schedule=schedule,
        spec=read_spec(payload["spec"]),
        created_at=now,
        updated_at=now,
        cursor=0,
    )
    job = _with_fields(job, payload)
    return _placed(job, now, zone)


def patch_job(job: CronJob, patch: Mapping[str, Any], now: int, zone: ZoneInfo) -> CronJob:
    """Return the job with the fields of `patch` changed."""
    _known_fields("patch", patch, JOB_FIELDS)
    changed = _with_fields(job, patch)
    if patch.get("schedule") is not None:
        changed = msgspec.structs.replace(changed, schedule=read_schedule(patch["schedule"], now, zone))
    if patch.get("spec") is not None:
        changed = msgspec.structs.replace(changed, spec=read_spec(patch["spec"], job.spec))
    changed = msgspec.structs.replace(changed, updated_at=now)
    if not changed.enabled:
        return msgspec.structs.replace(changed, next_at=None)
    if changed.schedule != job.schedule or not job.enabled:
        return _placed(changed, now, zone)
    return changed


def _placed(job: CronJob, now: int, zone: ZoneInfo) -> CronJob:
    """Return the job with its cursor at now; a one-shot that is slightly in the past stays due."""
    cursor = min(now, job.schedule.at_ms - 1) if isinstance(job.schedule, At) else now
    next_at = next_slot(job.schedule, cursor, zone)
    if isinstance(job.schedule, At) and job.schedule.at_ms < now - PAST_MS and job.enabled:
        raise InvalidArgs(f"schedule.at lies in the past: {in_words(job.schedule.at_ms, zone)}; give a new schedule")
    return msgspec.structs.replace(job, cursor=cursor, next_at=next_at if job.enabled else None)


def _with_fields(job: CronJob, payload: Mapping[str, Any]) -> CronJob:
    changes: dict[str, Any] = {}
    if "name" in payload:
        name = _text("name", payload["name"]).strip()
        if not name:
            raise InvalidArgs("Cron job name is required")
        changes["name"] = name[:MAX_NAME]
    if payload.get("agentId") is not None:
        changes["agent_id"] = session_keys.agent_id(_text("agentId", payload["agentId"]))
    for field, name in (("description", "description"), ("tag", "tag"), ("node", "node")):
        if field in payload:
            changes[name] = (_text(field, payload[field]).strip() or None) if payload[field] is not None else None
    if changes.get("node") is not None:
        try:
            validate_node_id(changes["node"])
        except ValueError as error:
            raise InvalidArgs(f"node: {error}") from None
    for field, name in (("enabled", "enabled"), ("deleteAfterRun", "delete_after_run")):
        if payload.get(field) is not None:
            changes[name] = _flag(field, payload[field])
    if payload.get("missed") is not None:
        changes["missed"] = payload["missed"]
        if payload["missed"] not in ("skip", "once", "all", "window"):
            raise InvalidArgs(f"missed must be skip, once, all or window, not {payload['missed']!r}")
    if payload.get("windowSeconds") is not None:
        changes["window_seconds"] = _number("windowSeconds", payload["windowSeconds"], 1, LAST_MS / 1000)
    if payload.get("retries") is not None:
        changes["retries"] = int(_number("retries", payload["retries"], 0, MAX_RETRIES))
    if payload.get("retryDelaySeconds") is not None:
        changes["retry_delay_seconds"] = _number("retryDelaySeconds", payload["retryDelaySeconds"], 0, 86_400)
    changed = msgspec.structs.replace(job, **changes)
    if changed.missed == "window" and changed.window_seconds is None:
        raise InvalidArgs("missed: window needs windowSeconds, the age up to which a slot still runs")
    return changed


# -- schedules --------------------------------------------------------------------------------------------


def read_schedule(value: Any, now: int, zone: ZoneInfo) -> Schedule:
    if not isinstance(value, Mapping):
        raise InvalidArgs("schedule must be an object")
    kind = value.get("kind")
    if kind is None:
        raise InvalidArgs("schedule.kind is required: at, every or cron")
    if kind == "at":
        return _read_at(value, now, zone)
    if kind == "every":
        return _read_every(value, now, zone)
    if kind == "cron":
        return _read_cron(value, now, zone)
    raise InvalidArgs(f"Unsupported schedule.kind: {kind}; use at, every or cron")


def read_schedule_text(text: str, now: int, zone: ZoneInfo, tz: str | None = None) -> Schedule:
    """Parse a cron expression, `every 30 minutes`, `every monday at 9`, or the moment of a one-shot."""
    there: dict[str, Any] = {} if tz is None else {"tz": tz}
    words = words_of(text)
    if (expression := read_phrase(text)) is not None:
        return _read_cron({"kind": "cron", "expr": expression, **there}, now, zone)
    if found := _EVERY_TEXT.fullmatch(words):
        length = read_duration(found[1] or f"1 {found[2]}")
        return _every(length, now)
    if len(words.split()) == 5 and not words.startswith("in "):
        return _read_cron({"kind": "cron", "expr": text.strip(), **there}, now, zone)
    try:
        return _read_at({"kind": "at", "at": text, **there}, now, zone)
    except InvalidArgs as error:
        hint = (
            ""
            if "past" in error.message
            else ' For a repeating job use a cron expression, "every 30 minutes" or "every monday at 9".'
        )
        raise InvalidArgs(error.message + hint) from None


def _read_at(value: Mapping[str, Any], now: int, zone: ZoneInfo) -> At:
    _known_fields("schedule", value, AT_FIELDS)
    zone = _zone(value, zone)
    moment: int | None = None
    if value.get("atMs") is not None:
        moment = checked(_number("schedule.atMs", value["atMs"], 0, LAST_MS), value["atMs"])
    elif _is_number(value.get("at")):
        moment = _epoch("schedule.at", value["at"])
    elif (delay := _multiple("schedule", value, "in", ("inMs", "delayMs"))) is not None:
        moment = checked(now + delay, delay)
    elif value.get("in") is not None:
        try:
            moment = checked(now + read_duration(_text("schedule.in", value["in"])), value["in"])
        except InvalidArgs:
            raise InvalidArgs(
                'schedule.in must use a relative duration like "in 2 hours" or "in 30 minutes", '
                f"not {str(value['in'])[:100]!r}"
            ) from None
    else:
        text = next((value[field] for field in ("at", "when", "atIso") if value.get(field) is not None), None)
        if text is not None:
            moment = read_moment(_text("schedule.at", text), now, zone)
    if moment is None:
        raise InvalidArgs('schedule.at requires atMs, at (datetime), or relative input such as "in 2 hours"')
    if moment < now - PAST_MS:
        raise InvalidArgs(f"schedule.at lies in the past: {in_words(moment, zone)}; it is {in_words(now, zone)} now")
    return At(moment)


def _read_every(value: Mapping[str, Any], now: int, zone: ZoneInfo) -> Every:
    _known_fields("schedule", value, EVERY_FIELDS)
    zone = _zone(value, zone)
    length = _multiple("schedule", value, "every")
    if length is None:
        raise InvalidArgs("schedule.every requires everyMs or everyMinutes/everyHours/everyDays (positive numbers)")
    anchor = now
    given = next((value[f] for f in ("anchorMs", "anchor", "anchorAt", "startAt") if value.get(f) is not None), None)
    if _is_number(given):
        anchor = _epoch("schedule.anchor", given)
    elif given is not None:
        anchor = read_moment(_text("schedule.anchor", given), now, zone)
    return _every(length, anchor)


def _every(length: float, anchor: int) -> Every:
    if not MIN_EVERY_MS <= length <= LAST_MS:
        raise InvalidArgs(f"schedule.every must be at least {MIN_EVERY_MS} ms, not {length:g} ms")
    return Every(round(length), anchor)


def _read_cron(value: Mapping[str, Any], now: int, zone: ZoneInfo) -> Cron:
    _known_fields("schedule", value, ("kind", "expr", "tz"))
    expr = value.get("expr")
    if not isinstance(expr, str) or not expr.strip():
        raise InvalidArgs("schedule.expr is required for kind=cron")
    words_of(expr)
    expr = " ".join(expr.split())
    check_expression(expr)
    _zone(value, zone)
    schedule = Cron(expr, value.get("tz"))
    if next_slot(schedule, now, zone) is None:
        raise InvalidArgs(f"cron expression {expr!r} matches no date")
    return schedule


def _zone(value: Mapping[str, Any], zone: ZoneInfo) -> ZoneInfo:
    return zone if value.get("tz") is None else zone_named(_text("schedule.tz", value["tz"]))


def _multiple(place: str, value: Mapping[str, Any], stem: str, plain: Collection[str] = ()) -> float | None:
    """Return the milliseconds of inSeconds, inMinutes …; None if none is given. Raises InvalidArgs if several are."""
    factors = {f"{stem}{unit}": factor for unit, factor in MULTIPLES.items()} | dict.fromkeys(plain, 1)
    given = [field for field in factors if value.get(field) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgs(f"{place} takes one of {' and '.join(given)}, not both")
    return _number(f"{place}.{given[0]}", value[given[0]], 0, LAST_MS) * factors[given[0]]


def _epoch(field: str, value: Any) -> int:
    number = _number(field, value, 0, LAST_MS)
    return checked(number * 1000 if number < SECONDS_BEFORE else number, value)


# -- specs ------------------------------------------------------------------------------------------------


def read_spec(value: Any, before: Spec | None = None) -> Spec:
    """Parse a spec. With `before`, change that spec: omitted fields stay as long as the mode is the same."""
    if not isinstance(value, Mapping):
        raise InvalidArgs("spec must be an object")
    given = dict(value)
    if before is not None:
        kept: dict[str, Any] = msgspec.to_builtins(before)
        if given.setdefault("mode", kept["mode"]) == kept["mode"]:
            given = {**kept, **given}
    mode = given.get("mode")
    if mode == "systemEvent":
        _known_fields("spec", given, ("mode", "text"))
        text = _text("spec.text", given.get("text") or "")
        if not text.strip():
            raise InvalidArgs("systemEvent spec requires non-empty text")
        return SystemEvent(text)
    if mode == "task":
        _known_fields("spec", given, TASK_FIELDS)
        message = _text("spec.message", given.get("message") or "")
        if not message.strip():
            raise InvalidArgs("task spec requires non-empty message")
        thinking = given.get("thinking")
        if thinking is not None and str(thinking).lower() not in THINKING_LEVELS:
            raise InvalidArgs(f"spec.thinking must be off, minimal, low, medium, high or xhigh, not {thinking!r}")
        limit = given.get("timeoutSeconds")
        return Task(
            message,
            deliver=None if given.get("deliver") is None else _flag("spec.deliver", given["deliver"]),
            channel=_optional("spec.channel", given.get("channel")),
            to=_optional("spec.to", given.get("to")),
            model=_optional("spec.model", given.get("model")),
            thinking=None if thinking is None else THINKING_LEVELS[str(thinking).lower()],
            timeout_seconds=None if limit is None else _number("spec.timeoutSeconds", limit, 0.001, 86_400),
            best_effort_deliver=_flag("spec.bestEffortDeliver", given.get("bestEffortDeliver") or False),
        )
    if mode == "call":
        return _read_call(given)
    if mode is None:
        raise InvalidArgs("spec.mode is required: systemEvent, task or call")
    raise InvalidArgs(f"Unknown cron spec mode: {mode}; use systemEvent, task or call")


def _read_call(given: Mapping[str, Any]) -> CallSpec:
    _known_fields("spec", given, ("mode", "tool", "args", "timeoutSeconds"))
    tool = _text("spec.tool", given.get("tool") or "").strip()
    if not tool or len(tool) > MAX_TOOL_NAME_CHARS:
        raise InvalidArgs("call spec requires tool, the name of a tool such as 'nas__Bash'")
    args = {} if given.get("args") is None else given["args"]
    if not isinstance(args, Mapping):
        raise InvalidArgs(f"spec.args must be an object, not {type(args).__name__}")
    try:
        size = len(msgspec.json.encode(args))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidArgs(f"spec.args: {error}") from None
    if size > MAX_TEXT:
        raise InvalidArgs(f"spec.args has {size} bytes; at most {MAX_TEXT} are kept")
    limit = given.get("timeoutSeconds")
    seconds = None if limit is None else _number("spec.timeoutSeconds", limit, 0.001, 86_400)
    return CallSpec(tool, dict(args), seconds)


# -- values -----------------------------------------------------------------------------------------------


def _known_fields(place: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    for field in value:
        if field not in known:
            near = difflib.get_close_matches(field[:MAX_COMPARED_LENGTH], known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InvalidArgs(f"{place} has no field {field[:50]!r}; {hint}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(field: str, value: Any, low: float, high: float) -> float:
    if not _is_number(value) or not math.isfinite(value):
        raise InvalidArgs(f"{field} must be a number, not {str(value)[:50]!r}")
    if not low <= value <= high:
        raise InvalidArgs(f"{field} must be between {low:g} and {high:g}, not {value}")
    return float(value) if isinstance(value, float) else value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgs(f"{field} must be a text, not {type(value).__name__}")
    if len(value) > MAX_TEXT:
        raise InvalidArgs(f"{field} has {len(value)} characters; at most {MAX_TEXT} are kept")
    return value


def _optional(field: str, value: Any) -> str | None:
    return None if value is None else _text(field, value).strip() or None


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgs(f"{field} must be true or false, not {str(value)[:50]!r}")
    return value
