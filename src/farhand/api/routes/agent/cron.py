"""Scheduled jobs. Changes pass the gate as calls of `gsv__Cron`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from farhand.api.server.http import Reply, Request, invalid, read_json
from farhand.api.server.router import JSON, Query, decoder_of, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import new_call_id, result_of
from farhand.gateway.schedule.jobs import MAX_PREVIEW, MAX_WAIT_SECONDS, CronJobs
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import ErrorKind, ToolError

# A job that cannot be run or changed is in conflict with the request.
CONFLICTS = {ErrorKind.CANCELLED: 409, ErrorKind.FAILED: 409}
job_route = partial(route, errors=(404, 409, 503, 504), statuses=CONFLICTS)
AGENT = Query("agentId", "Only jobs of this agent.")
PAGE = (Query("limit", "How many at most.", int), Query("offset", "How many to pass over.", int))


class CronRoutes:
    def __init__(self, gate: Gate, book: CronJobs) -> None:
        self._gate = gate
        self._book = book

    # -- reading ----------------------------------------------------------------------------------------

    @route(
        "GET /v1/cron",
        Scope.READ,
        "Scheduled jobs.",
        query=(AGENT, *PAGE, Query("includeDisabled", "1 shows those that are switched off, too.")),
    )
    async def listing(self, request: Request) -> Any:
        disabled = request.query("includeDisabled") or request.query("include_disabled")
        return await self._book.list(
            request.query("agentId") or request.query("agent_id"),
            include_disabled=disabled not in (None, "0", "false", "no"),
            limit=_number(request, "limit"),
            offset=_number(request, "offset") or 0,
        )

    @route("GET /v1/cron/status", Scope.READ, "The status of the schedule.", query=(AGENT,))
    async def status(self, request: Request) -> Any:
        return await self._book.status(request.query("agentId") or request.query("agent_id"))

    @job_route("GET /v1/cron/{job_id}", Scope.READ, "One job.")
    async def show(self, request: Request) -> Any:
        return {"job": await self._book.get(request.params["job_id"])}

    @job_route(
        "GET /v1/cron/runs",
        Scope.READ,
        "What ran, newest first.",
        query=(Query("jobId", "Only runs of this job."), *PAGE),
    )
    @job_route("GET /v1/cron/{job_id}/runs", Scope.READ, "What a job ran, newest first.", query=PAGE)
    async def runs(self, request: Request) -> Any:
        job_id = request.params.get("job_id") or request.query("jobId") or request.query("job_id")
        return await self._book.runs(job_id, limit=_number(request, "limit"), offset=_number(request, "offset") or 0)

    @job_route("POST /v1/cron/preview", Scope.READ, "When a schedule would fire.")
    async def preview(self, _request: Request, body: dict[str, Any]) -> Any:
        schedule = body.get("schedule")
        if isinstance(schedule, str):
            schedule = {"text": schedule, **({"tz": body["tz"]} if isinstance(body.get("tz"), str) else {})}
        count = body.get("count", 5)
        if isinstance(count, bool) or not isinstance(count, int):
            raise invalid(f"count must be a whole number, not {str(count)[:50]!r}")
        return await self._book.preview(schedule or {}, count)

    @job_route(
        "GET /v1/cron/{job_id}/preview",
        Scope.READ,
        "Next times at which a job runs.",
        query=(Query("count", f"How many moments: 1 to {MAX_PREVIEW}, 5 by default.", int),),
    )
    async def preview_job(self, request: Request) -> Any:
        count = request.query_int("count", 5, 1, MAX_PREVIEW)
        return await self._book.preview(request.params["job_id"], count)

    # -- changing ---------------------------------------------------------------------------------------

    @job_route(
        "POST /v1/cron",
        Scope.TOOLS_EXEC,
        "Add a job, as `gsv__Cron` does.",
        status=201,
        also={200: "What a body with `action` came to."},
        idempotent=True,
    )
    async def add(self, request: Request, body: dict[str, Any]) -> Reply:
        """Add a job, given as the body or under `job`; a body with `action` has the arguments of the tool."""
        if "action" in body:
            return await self._call(request, body)
        job = body["job"] if isinstance(body.get("job"), dict) else body
        return await self._call(request, {"action": "add", "job": job}, 201)

    @job_route("PATCH /v1/cron/{job_id}", Scope.TOOLS_EXEC, "Change a job.", idempotent=True)
    async def update(self, request: Request, body: dict[str, Any]) -> Reply:
        patch = body["patch"] if isinstance(body.get("patch"), dict) else body
        return await self._call(request, {"action": "update", "id": request.params["job_id"], "patch": patch})

    @job_route("DELETE /v1/cron/{job_id}", Scope.TOOLS_EXEC, "Remove a job.", idempotent=True)
    async def remove(self, request: Request) -> Reply:
        return await self._call(request, {"action": "remove", "id": request.params["job_id"]})

    @job_route("POST /v1/cron/{job_id}/run", Scope.TOOLS_EXEC, "Run a job now.", takes=JSON, idempotent=True)
    async def run(self, request: Request) -> Reply:
        body = await _optional_body(request)
        arguments = {"mode": "force", **body, "action": "run", "id": request.params["job_id"]}
        return await self._call(request, arguments)

    @job_route("POST /v1/cron/run", Scope.TOOLS_EXEC, "Run what is due.", takes=JSON, idempotent=True)
    async def run_due(self, request: Request) -> Reply:
        return await self._call(request, {**await _optional_body(request), "action": "run"})

    async def _call(self, request: Request, arguments: dict[str, Any], status: int = 200) -> Reply:
        call = ToolCall(
            id=new_call_id(),
            tool="gsv__Cron",
            args=msgspec.Raw(msgspec.json.encode(arguments)),
            timeout_ms=round(MAX_WAIT_SECONDS * 1000) + 30_000,
        )
        request.id = call.id
        opened = await self._gate.begin(call, principal=request.principal, idempotency_key=request.idempotency_key)
        record = await self._gate.wait(opened)
        request.id = record.id
        result = result_of(record)
        if result.error is not None:
            raise ToolError.of(result.error.kind, result.error.message)
        return Reply(bytes(result.result), status=status)


async def _optional_body(request: Request) -> dict[str, Any]:
    body = await request.body()
    return read_json(body, decoder_of(dict[str, Any])) if body.strip() else {}


def _number(request: Request, name: str) -> int | None:
    """Read the size or offset of a page; the schedule limits the size."""
    return None if request.query(name) is None else request.query_int(name, 0, 0, 2**31)
