"""`cron`: schedule jobs for the agent."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import click

from farhand.cli.calls.arguments import ToolSchema, read_arguments
from farhand.cli.client import Client, ClientError, url_path
from farhand.cli.commands import client_group, options_given
from farhand.cli.output import (
    Column,
    ago,
    duration,
    local_time,
    one_line,
    paint,
    plain,
    plain_lines,
    remark,
    show,
    show_fields,
    show_list,
    show_table,
)

RUN_SECONDS = 300.0
ID_LENGTH = 36
JOB = click.argument("job", metavar="JOB")
LIST_LIMIT = 200
TASK_OPTIONS = ("channel", "to", "deliver", "model", "thinking", "timeoutSeconds")
RUN_COLUMNS = [
    Column("SLOT", lambda run: local_time(run["slotAtMs"]), narrow=lambda text: text[5:-3]),
    Column("JOB", "jobName", flexible=True),
    Column("STATE", lambda run: run["status"] + (": late" if run["late"] and run["status"] != "missed" else "")),
    Column("TOOK", lambda run: duration(run.get("durationMs"))),
    Column("WHAT", lambda run: one_line(run.get("error") or run.get("summary") or ""), flexible=True),
]


@client_group
def cron(client: Client) -> None:
    """Schedule work for the agent, and see the results.

    \b
    Examples:
      farhand cron add standup '0 9 * * MON-FRI' 'Remind me of the stand-up.'
      farhand cron add backup 'every 6 hours' 'Back up.' --task --node nas
      farhand cron list
      farhand cron preview '30 2 * * *' --tz Europe/Berlin
      farhand cron runs

    JOB is the name of a job, its id, or the beginning of its id.
    """
    _list(client, limit=LIST_LIMIT)


@cron.command("list")
@click.option("--all", "every", is_flag=True, help="Include disabled jobs.")
@click.option("--agent", "agent_id", metavar="ID", help="Only jobs of this agent.")
@click.option("--limit", type=click.IntRange(1, 500), default=LIST_LIMIT, show_default=True)
@click.option("--offset", type=click.IntRange(0), default=0)
def list_(every: bool, agent_id: str | None, limit: int, offset: int, client: Client) -> None:
    """List jobs, next run first.

    \b
    Example:
      farhand cron list --all
    """
    _list(client, limit=limit, offset=offset, includeDisabled=int(every), agentId=agent_id)


def _list(client: Client, **query: Any) -> None:
    def render(value: dict[str, Any]) -> None:
        jobs = value["jobs"]
        if not jobs:
            remark("no jobs; create one with `farhand cron add`")
            return
        # Times are shown in the zone in which schedules are interpreted.
        zone = ZoneInfo(value["timezone"])
        columns = [
            Column("ID", "id", narrow=lambda text: text[:8]),
            Column("NAME", "name", flexible=True),
            Column("STATE", _state),
            Column("NEXT", lambda job: _next_run(job, zone), narrow=lambda text: text[5:16] or text),
            Column("LAST", lambda job: ago(job["state"].get("lastRunAtMs"))),
            Column("SCHEDULE", "scheduleHuman", flexible=True),
        ]
        show_table(columns, jobs)
        for job in jobs:
            if "pausedReason" in job:
                remark(plain(f"{job['name']} ({job['id']}) is paused: {job['pausedReason']}"))
        shown = value["offset"] + len(jobs)
        if value["count"] > shown:
            remark(f"{value['count'] - shown} more: --offset {shown}")

    show(client.get("/v1/cron", **query), render)


def _state(job: dict[str, Any]) -> str:
    if not job["enabled"]:
        return "disabled"
    if "pausedReason" in job:
        return "paused"
    return "running" if "runningAtMs" in job["state"] else str(job["state"].get("lastStatus", "new"))


def _next_run(job: dict[str, Any], zone: ZoneInfo) -> str:
    at = job["state"].get("nextRunAtMs")
    return "never" if at is None else f"{datetime.fromtimestamp(at / 1000, zone):%Y-%m-%d %H:%M:%S %Z}"


def _path(client: Client, job: str) -> str:
    """Return the path of a job given by id, beginning of the id, or name. Raises ClientError if several match."""
    if len(job) != ID_LENGTH and not job.startswith("heartbeat:"):
        jobs = client.get("/v1/cron", includeDisabled=1, limit=500).value["jobs"]
        found = [one for one in jobs if one["name"] == job] or [one for one in jobs if one["id"].startswith(job)]
        if len(found) > 1:
            raise ClientError("ambiguous", f"{len(found)} jobs match {job!r}; give more of the id")
        if found:
            job = found[0]["id"]
    return url_path("/v1/cron/{}", job)


def _parse_schedule(client: Client, schedule: str, tz: str | None) -> Any:
    asked = {"schedule": schedule, "count": 1, **options_given(tz=tz or None)}
    return client.post("/v1/cron/preview", asked).value["schedule"]


@cron.command()
@click.argument("name")
@click.argument("schedule")
@click.argument("text", nargs=-1, metavar="[TEXT | KEY=VALUE…]")
@click.option("--call", "tool", metavar="TOOL", help="Call this tool, without a model; its arguments follow.")
@click.option("--task", is_flag=True, help="Run in a new session of its own instead of the main one.")
@click.option("--tz", metavar="ZONE", help="IANA time zone of the schedule.  [the user's]")
@click.option("--agent", "agentId", metavar="ID", help="Agent that owns the job.  [main]")
@click.option("--description")
@click.option(
    "--delete-after-run", "deleteAfterRun", is_flag=True, default=None, help="Delete a one-time job after it succeeds."
)
@click.option("--missed", type=click.Choice(["skip", "once", "all", "window"]), help="What to do about missed slots.")
@click.option(
    "--window", "windowSeconds", type=float, metavar="SECONDS", help="With --missed window: maximum age of a slot."
)
@click.option("--retries", type=click.IntRange(0, 10), help="How often a failed run is repeated.")
@click.option("--node", metavar="ID", help="Run only while this node is connected; use no other node.")
@click.option("--tag", help="Run only while a node with this tag is connected; use no other node.")
@click.option("--channel", help="With --task: channel for the reply.")
@click.option("--to", metavar="PEER", help="With --task: recipient of the reply.")
@click.option("--no-deliver", "deliver", flag_value=False, default=None, help="With --task: do not send the reply.")
@click.option("--model", help="With --task: the model.")
@click.option("--thinking", help="With --task: off, minimal, low, medium, high, xhigh.")
@click.option("--timeout", "timeoutSeconds", type=float, metavar="SECONDS", help="With --task: time limit of a run.")
def add(
    schedule: str, text: tuple[str, ...], tool: str | None, task: bool, tz: str | None, client: Client, **options: Any
) -> None:
    """Add a job.

    SCHEDULE is a cron expression of five fields, an interval (`every 30 minutes`), days and a time (`every monday
    at 9`), or a moment (`in 2 hours`, `tomorrow 9am`, `2026-03-01T09:00`). TEXT is the message the agent receives.
    With --call no model is involved: the arguments of the tool follow, as for `farhand call`.

    \b
    Examples:
      farhand cron add standup '0 9 * * MON-FRI' 'Remind me.' --tz Europe/Berlin
      farhand cron add tea 'in 4 minutes' 'The tea is ready.' --delete-after-run
      farhand cron add report 'every friday at 18:00' 'Report.' --task
      farhand cron add disk 'every day at 7' --call nas__Bash command='df -h'
    """
    for_task = {name: value for name in TASK_OPTIONS if (value := options.pop(name)) is not None}
    if tool is not None:
        given = {name: for_task.pop(name) for name in ("timeoutSeconds",) if name in for_task}
        if task or for_task:
            raise click.UsageError("--call takes no options of --task except --timeout.")
        arguments = read_arguments(text, ToolSchema.of(client, tool, text))
        if not isinstance(arguments, dict):
            raise click.UsageError("the arguments of --call must be an object.")
        spec: dict[str, Any] = {"mode": "call", "tool": tool, "args": arguments, **given}
    elif len(text) != 1:
        raise click.UsageError("give one TEXT, in quotes; or a tool with --call and its arguments.")
    elif for_task and not task:
        options_by_name = {one.name: one.opts[0] for one in click.get_current_context().command.params}
        raise click.UsageError(f"{options_by_name[next(iter(for_task))]} requires --task.")
    else:
        spec = {"mode": "task", "message": text[0], **for_task} if task else {"mode": "systemEvent", "text": text[0]}
    body = {"schedule": _parse_schedule(client, schedule, tz), "spec": spec, **options_given(**options)}
    show(client.post("/v1/cron", body), _show_job)
    _warn(client, spec, options.get("node"))


def _warn(client: Client, spec: dict[str, Any], node_id: str | None) -> None:
    """Say that the job would fail or wait if it ran now. It may be meant for a machine that joins later."""
    if node_id and not any(node["node_id"] == node_id for node in client.get("/v1/nodes").value["nodes"]):
        remark(plain(f"warning: there is no node {node_id!r} yet; the job waits until it joins. See `farhand nodes`"))
    if spec["mode"] != "call":
        return
    try:
        client.post("/v1/policy/explain", {"tool": spec["tool"], "args": spec["args"]})
    except ClientError as error:
        if error.code != "forbidden":  # the check needs more rights than the job
            remark(plain(f"warning: the call would fail now: {error}"))


@cron.command("show")
@JOB
def show_job(job: str, client: Client) -> None:
    """Show one job."""
    show(client.get(_path(client, job)), _show_job)


def _show_job(value: dict[str, Any]) -> None:
    job, spec, state = value["job"], value["job"]["spec"], value["job"]["state"]
    show_fields(
        {
            "id": job["id"],
            "name": job["name"],
            "description": job.get("description"),
            "agent": job["agentId"],
            "enabled": "yes" if job["enabled"] else "no",
            "schedule": job["scheduleHuman"],
            "next": job.get("nextRunHuman", "never"),
            "last": f"{state['lastStatus']}, {ago(state.get('lastRunAtMs'))}" if "lastStatus" in state else None,
            "error": state.get("lastError"),
            "missed": job["missed"],
            "node": job.get("node"),
            "tag": job.get("tag"),
            "mode": spec["mode"],
            "text": spec.get("text") or spec.get("message"),
            "tool": spec.get("tool"),
            "arguments": json.dumps(spec["args"], ensure_ascii=False) if spec.get("args") else None,
        }
    )


@cron.command()
@JOB
@click.option("--name")
@click.option("--schedule", help="As for `farhand cron add`.")
@click.option("--tz", metavar="ZONE", help="Time zone of --schedule.")
@click.option("--text", help="The message the agent receives.")
@click.option("--enable/--disable", "enabled", default=None, help="Switch the job on or off.")
@click.option("--patch", metavar="JSON", help="Any other fields, as for `gsv__Cron`.")
def update(
    job: str, schedule: str | None, tz: str | None, text: str | None, patch: str | None, client: Client, **fields: Any
) -> None:
    """Change a job.

    \b
    Examples:
      farhand cron update standup --disable
      farhand cron update standup --schedule '0 10 * * MON-FRI'
      farhand cron update standup --patch '{"missed": "skip"}'
    """
    path = _path(client, job)
    try:
        body = json.loads(patch) if patch is not None else {}
    except ValueError as error:
        raise click.UsageError(f"--patch is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise click.UsageError("--patch is not a JSON object.")
    body |= options_given(**fields)
    if schedule is not None:
        body["schedule"] = _parse_schedule(client, schedule, tz)
    if text is not None:
        mode = client.get(path).value["job"]["spec"]["mode"]
        if mode == "call":
            raise click.UsageError('this job calls a tool; change it with --patch \'{"spec": {"args": {…}}}\'.')
        body["spec"] = {"mode": mode, ("message" if mode == "task" else "text"): text}
    if not body:
        raise click.UsageError("nothing to change; give at least one option.")
    show(client.request("PATCH", path, body), _show_job)


@cron.command()
@JOB
def remove(job: str, client: Client) -> None:
    """Remove a job and its history; a run in progress is stopped."""
    show(client.delete(_path(client, job)), f"removed: {job}")


@cron.command()
@click.argument("job", metavar="[JOB]", required=False)
@click.option("--due", is_flag=True, help="Only if it is due; without a JOB, all jobs that are due.")
@click.option("--wait", type=float, default=60.0, show_default=True, metavar="SECONDS", help="How long to wait for it.")
def run(job: str | None, due: bool, wait: float, client: Client) -> int:
    """Run a job now, in addition to its schedule. The exit status is 0 only if it succeeds.

    \b
    Examples:
      farhand cron run standup
      farhand cron run --due
    """
    if job is None and not due:
        raise click.UsageError("give a JOB, or --due.")

    def render(value: dict[str, Any]) -> None:
        for result in value["results"]:
            print(f"{paint(result['status'], bold=True)}  {plain(result.get('jobName', result['jobId']))}")
            for field in ("error", "summary"):
                if result.get(field):
                    print(plain_lines(result[field]))
        if not value["results"]:
            remark("nothing is due")

    path = "/v1/cron" if job is None else _path(client, job)
    body = {"mode": "due" if due else "force", "waitSeconds": wait}
    answer = client.post(f"{path}/run", body, seconds=RUN_SECONDS)
    show(answer, render)
    return 0 if all(result["status"] in ("ok", "running") for result in answer.value["results"]) else 1


@cron.command()
@click.argument("job", metavar="[JOB]", required=False)
@click.option("--limit", type=click.IntRange(1, 2000), default=50, show_default=True)
@click.option("--offset", type=click.IntRange(0), default=0)
def runs(job: str | None, limit: int, offset: int, client: Client) -> None:
    """List past runs of one job, or of all, newest first.

    \b
    Example:
      farhand cron runs --limit 20
    """
    path = "/v1/cron" if job is None else _path(client, job)
    show_list(client.get(f"{path}/runs", limit=limit, offset=offset), "runs", RUN_COLUMNS, "no runs yet")


@cron.command()
@click.argument("what", metavar="SCHEDULE | ID")
@click.option("--count", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--tz", metavar="ZONE", help="IANA time zone.  [the user's]")
def preview(what: str, count: int, tz: str | None, client: Client) -> None:
    """Show the next times of a schedule or a job. Nothing is added.

    \b
    Examples:
      farhand cron preview '30 2 * * *' --tz Europe/Berlin
      farhand cron preview 'every 90 minutes'
      farhand cron preview 1f8a5c0e-6b0e-4f0e-9a53-0c6f1d6a7a11 --count 10
    """

    def render(value: dict[str, Any]) -> None:
        print(paint(plain(value["scheduleHuman"]), bold=True))
        for slot in value["slots"]:
            print(plain(slot["human"]))
        if not value["slots"]:
            remark("the schedule has no further times")

    if len(what) == ID_LENGTH and what.count("-") == 4 and tz is None:
        answer = client.get("/v1/cron/{}/preview", what, count=count)
    else:
        answer = client.post("/v1/cron/preview", {"schedule": what, "count": count, **options_given(tz=tz or None)})
    show(answer, render)


@cron.command()
def status(client: Client) -> None:
    """Show whether the scheduler is enabled, and the next run."""
    answer = client.get("/v1/cron/status")
    value = answer.value
    fields = {
        "scheduler": "on" if value["enabled"] else "off: [schedule] enabled = false",
        "jobs": f"{value['count']} of {value['maxJobs']}",
        "due": value["dueCount"],
        "running": f"{value['runningCount']} of {value['maxConcurrentRuns']}",
        "next": value.get("nextRunHuman", "nothing"),
        "now": f"{value['currentTime']} ({value['timezone']})",
    }
    show(answer, lambda _: show_fields(fields))
