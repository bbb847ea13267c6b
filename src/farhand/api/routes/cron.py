"""The HTTP routes of schedules. What changes something goes through the gate, as the call of `gsv__Cron` it is."""

from __future__ import annotations

from typing import Any

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply, read_json
from farhand.api.server.route_docs import JSON, About, Query
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import MAX_IDEMPOTENCY_KEY, IdempotencyConflict
from farhand.gateway.calls.open_call import new_call_id, result_of
from farhand.gateway.hub import Hub
from farhand.gateway.schedule.jobs import MAX_PREVIEW, MAX_WAIT_SECONDS, CronBook
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import ErrorKind, ToolError
from farhand.store.ports import StoreError

STATUS = {
    ErrorKind.INVALID_ARGS: 400,
    ErrorKind.NOT_ALLOWED: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.CANCELLED: 409,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.FAILED: 409,
}

_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


FAILURES = (404, 409, 503, 504)
AGENT = Query("agentId", "Of this agent.")
PAGE = (Query("limit", "How many at most.", int), Query("offset", "How many to pass over.", int))


def cron_routes(hub: Hub, book: CronBook) -> list[Route]:
    doors = CronDoors(hub, book)
    return [
        Route(
            "GET",
            "/v1/cron",
            Scope.READ,
            doors.listing,
            about=About(
                "Scheduled jobs.",
                query=(AGENT, *PAGE, Query("includeDisabled", "1 shows those that are switched off, too.")),
            ),
        ),
        Route(
            "POST",
            "/v1/cron",
            Scope.TOOLS_EXEC,
            doors.add,
            about=About(
                "Add a job, as `gsv__Cron` does.",
                body=dict[str, Any],
                status=201,
                also={200: "What a body with `action` came to."},
                errors=FAILURES,
                idempotent=True,
            ),
        ),
        Route("GET", "/v1/cron/status", Scope.READ, doors.status, about=About("How the schedule is.", query=(AGENT,))),
        Route(
            "GET",
            "/v1/cron/runs",
            Scope.READ,
            doors.runs,
            about=About("What ran, newest first.", query=(Query("jobId", "Of this job."), *PAGE), errors=FAILURES),
        ),
        Route(
            "POST",
            "/v1/cron/run",
            Scope.TOOLS_EXEC,
            doors.run_due,
            about=About("Run what is due.", takes=JSON, errors=FAILURES, idempotent=True),
        ),
        Route(
            "POST",
            "/v1/cron/preview",
            Scope.READ,
            doors.preview,
            about=About("When a schedule would fire.", body=dict[str, Any], errors=FAILURES),
        ),
        Route("GET", "/v1/cron/{job_id}", Scope.READ, doors.show, about=About("One job.", errors=FAILURES)),
        Route(
            "PATCH",
            "/v1/cron/{job_id}",
            Scope.TOOLS_EXEC,
            doors.update,
            about=About("Change a job.", body=dict[str, Any], errors=FAILURES, idempotent=True),
        ),
        Route(
            "DELETE",
            "/v1/cron/{job_id}",
            Scope.TOOLS_EXEC,
            doors.remove,
            about=About("Remove a job.", errors=FAILURES, idempotent=True),
        ),
        Route(
            "POST",
            "/v1/cron/{job_id}/run",
            Scope.TOOLS_EXEC,
            doors.run,
            about=About("Run a job now.", takes=JSON, errors=FAILURES, idempotent=True),
        ),
        Route(
            "GET",
            "/v1/cron/{job_id}/runs",
            Scope.READ,
            doors.runs,
            about=About("What a job ran, newest first.", query=PAGE, errors=FAILURES),
        ),
        Route(
            "GET",
            "/v1/cron/{job_id}/preview",
            Scope.READ,
            doors.preview_job,
            about=About(
                "When a job will fire.",
                query=(Query("count", f"How many moments: 1 to {MAX_PREVIEW}, 5 by default.", int),),
                errors=FAILURES,
            ),
        ),
    ]


class CronDoors:
    """One method for each route."""

    def __init__(self, hub: Hub, book: CronBook) -> None:
        self._hub = hub
        self._book = book

    # -- reading ----------------------------------------------------------------------------------------

    async def listing(self, request: Request) -> Reply:
        disabled = request.query("includeDisabled") or request.query("include_disabled")
        return json_reply(
            await self._book.list(
                request.query("agentId") or request.query("agent_id"),
                include_disabled=disabled not in (None, "0", "false", "no"),
                limit=_number(request, "limit"),
                offset=_number(request, "offset") or 0,
            )
        )

    async def status(self, request: Request) -> Reply:
        return json_reply(await self._book.status(request.query("agentId") or request.query("agent_id")))

    async def show(self, request: Request) -> Reply:
        try:
            return json_reply({"job": await self._book.get(request.params["job_id"])})
        except ToolError as error:
            raise problem(error) from None

    async def runs(self, request: Request) -> Reply:
        job_id = request.params.get("job_id") or request.query("jobId") or request.query("job_id")
        try:
            return json_reply(
                await self._book.runs(job_id, limit=_number(request, "limit"), offset=_number(request, "offset") or 0)
            )
        except ToolError as error:
            raise problem(error) from None

    async def preview(self, request: Request) -> Reply:
        body: dict[str, Any] = await request.json(_decoder)
        schedule = body.get("schedule")
        if isinstance(schedule, str):
            schedule = {"text": schedule, **({"tz": body["tz"]} if isinstance(body.get("tz"), str) else {})}
        count = body.get("count", 5)
        if isinstance(count, bool) or not isinstance(count, int):
            raise Problem(400, "invalid_request", f"count must be a whole number, not {str(count)[:50]!r}")
        try:
            return json_reply(await self._book.preview(schedule or {}, count))
        except ToolError as error:
            raise problem(error) from None

    async def preview_job(self, request: Request) -> Reply:
        count = request.query_int("count", 5, 1, MAX_PREVIEW)
        try:
            return json_reply(await self._book.preview(request.params["job_id"], count))
        except ToolError as error:
            raise problem(error) from None

    # -- changing ---------------------------------------------------------------------------------------

    async def add(self, request: Request) -> Reply:
        """A job, bare or under `job`; a body with `action` is the arguments of the tool."""
        body: dict[str, Any] = await request.json(_decoder)
        if "action" in body:
            return await self._call(request, body)
        job = body["job"] if isinstance(body.get("job"), dict) else body
        return await self._call(request, {"action": "add", "job": job}, 201)

    async def update(self, request: Request) -> Reply:
        body: dict[str, Any] = await request.json(_decoder)
        patch = body["patch"] if isinstance(body.get("patch"), dict) else body
        return await self._call(request, {"action": "update", "id": request.params["job_id"], "patch": patch})

    async def remove(self, request: Request) -> Reply:
        return await self._call(request, {"action": "remove", "id": request.params["job_id"]})

    async def run(self, request: Request) -> Reply:
        body = await _optional_body(request)
        arguments = {"mode": "force", **body, "action": "run", "id": request.params["job_id"]}
        return await self._call(request, arguments)

    async def run_due(self, request: Request) -> Reply:
        return await self._call(request, {**await _optional_body(request), "action": "run"})

    async def _call(self, request: Request, arguments: dict[str, Any], status: int = 200) -> Reply:
        key = request.header(b"idempotency-key")
        if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
            raise Problem(400, "invalid_request", f"Idempotency-Key has 1 to {MAX_IDEMPOTENCY_KEY} characters")
        call = ToolCall(
            id=new_call_id(),
            tool="gsv__Cron",
            args=msgspec.Raw(msgspec.json.encode(arguments)),
            timeout_ms=round(MAX_WAIT_SECONDS * 1000) + 30_000,
        )
        request.id = call.id
        gate = self._hub.gate
        try:
            opened = await gate.begin(call, principal=request.principal, idempotency_key=key)
        except IdempotencyConflict as error:
            raise Problem(409, "idempotency_conflict", str(error)) from None
        except StoreError as error:
            raise Problem(503, "not_recorded", f"nothing was changed: {error}") from None
        record = await gate.wait(opened)
        request.id = record.id
        result = result_of(record)
        if result.error is not None:
            raise problem(ToolError.of(result.error.kind, result.error.message))
        return Reply(bytes(result.result), status=status)


def problem(error: ToolError) -> Problem:
    return Problem(STATUS[error.kind], error.kind.value, error.message)


async def _optional_body(request: Request) -> dict[str, Any]:
    body = await request.body()
    return read_json(body, _decoder) if body.strip() else {}


def _number(request: Request, name: str) -> int | None:
    """A page's size and place; what is too large for a page is cut to it there."""
    return None if request.query(name) is None else request.query_int(name, 0, 0, 2**31)
