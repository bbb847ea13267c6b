"""`cron`: jobs that the agent does at their time."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode
from zoneinfo import ZoneInfo

import click

from farhand.cli.client import Client, ClientError, client_command
from farhand.cli.output import (
    Column,
    ago,
    moment,
    paint,
    plain,
    plain_lines,
    remark,
    show_answer,
    show_fields,
    show_table,
    took,
)

PATIENCE_SECONDS = 300.0
ID_LENGTH = 36


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@client_command
def cron(client: Client, as_json: bool) -> None:
    """Schedule work for the agent, and see what became of it.

    \b
    Examples:
      farhand cron add standup '0 9 * * MON-FRI' 'Remind me of the stand-up.'
      farhand cron add backup 'every 6 hours' 'Back up the photos.' --task --node nas
      farhand cron list
      farhand cron preview '30 2 * * *' --tz Europe/Berlin
      farhand cron runs

    A JOB is named by its name, its id, or the beginning of that.
    """
    if click.get_current_context().invoked_subcommand is None:
        _list(client, {"limit": 200}, as_json)


@cron.command("list")
@click.option("--all", "all_", is_flag=True, help="Disabled jobs too.")
@click.option("--agent", "agent_id", metavar="ID", help="Only this agent's.")
@click.option("--limit", type=click.IntRange(1, 500), default=200, show_default=True)
@click.option("--offset", type=click.IntRange(0), default=0)
@client_command
def list_(all_: bool, agent_id: str | None, limit: int, offset: int, client: Client, as_json: bool) -> None:
    """List jobs, the next one first.

    \b
    Example:
      farhand cron list --all
    """
    query: dict[str, Any] = {"limit": limit, "offset": offset, "includeDisabled": int(all_)}
    if agent_id is not None:
        query["agentId"] = agent_id
    _list(client, query, as_json)


def _list(client: Client, query: dict[str, Any], as_json: bool) -> None:
    answer = client.get(f"/v1/cron?{urlencode(query)}")
    jobs = answer.value["jobs"]
    if as_json:
        show_answer(answer)
    elif not jobs:
        remark("there are no jobs; `farhand cron add --help` shows how to make one")
    else:
        columns = [
            Column("ID"),
            Column("NAME", flexible=True),
            Column("STATE"),
            Column("NEXT"),
            Column("LAST"),
            Column("SCHEDULE", flexible=True),
        ]
        zone = ZoneInfo(answer.value["timezone"])
        show_table(columns, [_row(job, zone) for job in jobs])
        for job in jobs:
            if "pausedReason" in job:
                remark(plain(f"{job['name']} ({job['id']}) is paused: {job['pausedReason']}"))
        shown = answer.value["offset"] + len(jobs)
        if answer.value["count"] > shown:
            remark(f"{answer.value['count'] - shown} more: --offset {shown}")


def _row(job: dict[str, Any], zone: ZoneInfo) -> list[str]:
    """Moments are shown in the zone that schedules are read in."""
    state = job["state"]
    shown = "running" if "runningAtMs" in state else state.get("lastStatus", "new")
    return [
        job["id"],
        job["name"],
        ("paused" if "pausedReason" in job else shown) if job["enabled"] else "disabled",
        f"{datetime.fromtimestamp(state['nextRunAtMs'] / 1000, zone):%Y-%m-%d %H:%M:%S %Z}"
        if "nextRunAtMs" in state
        else "never",
        ago(state.get("lastRunAtMs")),
        job["scheduleHuman"],
    ]


def _path(client: Client, named: str) -> str:
    """Where a job is found, by its id, the beginning of it, or its name. Raises ClientError when that fits several."""
    if len(named) != ID_LENGTH and not named.startswith("heartbeat:"):
        jobs = client.get("/v1/cron?includeDisabled=1&limit=500").value["jobs"]
        found = [job for job in jobs if job["name"] == named] or [job for job in jobs if job["id"].startswith(named)]
        if len(found) > 1:
            raise ClientError("ambiguous", f"{len(found)} jobs are named {named!r}; say more of the id")
        if found:
            named = found[0]["id"]
    return f"/v1/cron/{quote(named, safe='')}"


@cron.command()
@click.argument("name")
@click.argument("schedule")
@click.argument("text")
@click.option("--task", is_flag=True, help="Run in a clean session of its own, not in the main one.")
@click.option("--tz", metavar="ZONE", help="IANA time zone of a cron expression or time.  [the user's]")
@click.option("--agent", "agent_id", metavar="ID", help="Agent that owns the job.  [main]")
@click.option("--description")
@click.option("--delete-after-run", is_flag=True, help="Forget a one-shot after it succeeded.")
@click.option("--missed", type=click.Choice(["skip", "once", "all", "window"]), help="What to do about missed slots.")
@click.option("--window", type=float, metavar="SECONDS", help="For --missed window: how old a slot may be.")
@click.option("--retries", type=click.IntRange(0, 10), help="How often a failed run is tried again.")
@click.option("--node", metavar="ID", help="Run when this node is connected, and reach no other.")
@click.option("--tag", help="Run when a node with this tag is connected, and reach no other.")
@click.option("--channel", help="For --task: where the reply goes.")
@click.option("--to", metavar="PEER", help="For --task: who gets the reply.")
@click.option("--no-deliver", is_flag=True, help="For --task: keep the reply.")
@click.option("--model", help="For --task.")
@click.option("--thinking", help="For --task: off, minimal, low, medium, high, xhigh.")
@click.option("--timeout", type=float, metavar="SECONDS", help="For --task: how long a run may take.")
@client_command
def add(name: str, schedule: str, text: str, client: Client, as_json: bool, **options: Any) -> None:
    """Add a job.

    SCHEDULE is a cron expression of five fields, `every 30 minutes`, or a moment: `in 2 hours`, `tomorrow 9am`,
    `2026-03-01T09:00`. TEXT is what the agent is told at that time.

    \b
    Examples:
      farhand cron add standup '0 9 * * MON-FRI' 'Remind me of the stand-up.' --tz Europe/Berlin
      farhand cron add tea 'in 4 minutes' 'The tea is ready, tell me.' --delete-after-run
      farhand cron add report '0 18 * * FRI' 'Write the weekly report.' --task --timeout 600
    """
    asked: dict[str, Any] = {"schedule": schedule, "count": 1}
    if options["tz"]:
        asked["tz"] = options["tz"]
    read = client.request("POST", "/v1/cron/preview", asked).value["schedule"]
    body = {"name": name, "schedule": read, "spec": _spec(text, options), **_fields(options)}
    answer = client.request("POST", "/v1/cron", body)
    if as_json:
        show_answer(answer)
    else:
        _show(answer.value["job"])


def _spec(text: str, options: dict[str, Any]) -> dict[str, Any]:
    if not options["task"]:
        for_task = [n for n in ("channel", "to", "no_deliver", "model", "thinking", "timeout") if options[n]]
        if for_task:
            raise click.UsageError(f"--{for_task[0].replace('_', '-')} is for jobs with --task.")
        return {"mode": "systemEvent", "text": text}
    spec: dict[str, Any] = {"mode": "task", "message": text}
    for field in ("channel", "to", "model", "thinking"):
        if options[field]:
            spec[field] = options[field]
    if options["timeout"]:
        spec["timeoutSeconds"] = options["timeout"]
    if options["no_deliver"]:
        spec["deliver"] = False
    return spec


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    names = {
        "agent_id": "agentId",
        "description": "description",
        "missed": "missed",
        "window": "windowSeconds",
        "retries": "retries",
        "node": "node",
        "tag": "tag",
    }
    fields = {field: options[name] for name, field in names.items() if options.get(name) is not None}
    if options.get("delete_after_run"):
        fields["deleteAfterRun"] = True
    return fields


@cron.command()
@click.argument("job_id", metavar="JOB")
@client_command
def show(job_id: str, client: Client, as_json: bool) -> None:
    """Show one job."""
    answer = client.get(_path(client, job_id))
    if as_json:
        show_answer(answer)
    else:
        _show(answer.value["job"])


def _show(job: dict[str, Any]) -> None:
    spec, state = job["spec"], job["state"]
    show_fields(
        [
            ("id", job["id"]),
            ("name", job["name"]),
            ("description", job.get("description", "")),
            ("agent", job["agentId"]),
            ("enabled", "yes" if job["enabled"] else "no"),
            ("schedule", job["scheduleHuman"]),
            ("next", job.get("nextRunHuman", "never")),
            ("last", f"{state['lastStatus']}, {ago(state.get('lastRunAtMs'))}" if "lastStatus" in state else ""),
            ("error", state.get("lastError", "")),
            ("missed", job["missed"]),
            ("node", job.get("node", "")),
            ("tag", job.get("tag", "")),
            ("mode", spec["mode"]),
            ("text", spec.get("text") or spec.get("message") or ""),
        ]
    )


@cron.command()
@click.argument("job_id", metavar="JOB")
@click.option("--name")
@click.option("--schedule", help="As for `farhand cron add`.")
@click.option("--tz", metavar="ZONE", help="For --schedule.")
@click.option("--text", help="What the agent is told.")
@click.option("--enable/--disable", "enabled", default=None, help="Switch it on or off.")
@click.option("--patch", metavar="JSON", help="Any fields, as for `gsv__Cron`.")
@client_command
def update(
    job_id: str,
    name: str | None,
    schedule: str | None,
    tz: str | None,
    text: str | None,
    enabled: bool | None,
    patch: str | None,
    client: Client,
    as_json: bool,
) -> None:
    """Change a job.

    \b
    Examples:
      farhand cron update standup --disable
      farhand cron update standup --schedule '0 10 * * MON-FRI'
      farhand cron update standup --patch '{"missed": "skip"}'
    """
    path = _path(client, job_id)
    body: dict[str, Any] = {}
    if patch is not None:
        try:
            body = json.loads(patch)
        except ValueError as error:
            raise click.UsageError(f"--patch takes a JSON object: {error}") from None
        if not isinstance(body, dict):
            raise click.UsageError("--patch takes a JSON object.")
    if name is not None:
        body["name"] = name
    if enabled is not None:
        body["enabled"] = enabled
    if schedule is not None:
        asked = {"schedule": schedule, "count": 1} | ({"tz": tz} if tz else {})
        body["schedule"] = client.request("POST", "/v1/cron/preview", asked).value["schedule"]
    if text is not None:
        mode = client.get(path).value["job"]["spec"]["mode"]
        body["spec"] = {"mode": mode, ("message" if mode == "task" else "text"): text}
    if not body:
        raise click.UsageError("nothing to change; see --help.")
    answer = client.request("PATCH", path, body)
    if as_json:
        show_answer(answer)
    else:
        _show(answer.value["job"])


@cron.command()
@click.argument("job_id", metavar="JOB")
@client_command
def remove(job_id: str, client: Client, as_json: bool) -> None:
    """Remove a job and its history; a run of it is stopped."""
    answer = client.request("DELETE", _path(client, job_id))
    if as_json:
        show_answer(answer)
    else:
        print(f"removed: {plain(job_id)}")


@cron.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("--due", is_flag=True, help="Only if it is due; without a JOB, everything that is.")
@click.option("--wait", type=float, default=60.0, show_default=True, metavar="SECONDS", help="How long to wait for it.")
@client_command
def run(job_id: str | None, due: bool, wait: float, client: Client, as_json: bool) -> int:
    """Run a job now, beside its schedule. The status is 0 only when it succeeded.

    \b
    Examples:
      farhand cron run standup
      farhand cron run --due
    """
    if job_id is None and not due:
        raise click.UsageError("name a job, or say --due.")
    body: dict[str, Any] = {"mode": "due" if due else "force", "waitSeconds": wait}
    if job_id is not None:
        answer = client.request("POST", f"{_path(client, job_id)}/run", body, seconds=PATIENCE_SECONDS)
    else:
        answer = client.request("POST", "/v1/cron/run", body, seconds=PATIENCE_SECONDS)
    results = answer.value["results"]
    if as_json:
        show_answer(answer)
    elif not results:
        remark("nothing is due")
    for result in results if not as_json else ():
        _show_run(result)
    return 0 if all(result["status"] in ("ok", "running") for result in results) else 1


def _show_run(result: dict[str, Any]) -> None:
    print(f"{paint(result['status'], bold=True)}  {plain(result.get('jobName', result['jobId']))}")
    for field in ("error", "summary"):
        if result.get(field):
            print(plain_lines(result[field]))


@cron.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("--limit", type=click.IntRange(1, 2000), default=50, show_default=True)
@click.option("--offset", type=click.IntRange(0), default=0)
@client_command
def runs(job_id: str | None, limit: int, offset: int, client: Client, as_json: bool) -> None:
    """What became of past slots, newest first: of one job, or of all.

    \b
    Example:
      farhand cron runs --limit 20
    """
    place = "/v1/cron/runs" if job_id is None else f"{_path(client, job_id)}/runs"
    answer = client.get(f"{place}?limit={limit}&offset={offset}")
    found = answer.value["runs"]
    if as_json:
        show_answer(answer)
    elif not found:
        remark("nothing has run yet")
    else:
        columns = [
            Column("SLOT"),
            Column("JOB", flexible=True),
            Column("STATE"),
            Column("TOOK"),
            Column("WHAT", flexible=True),
        ]
        rows = [
            [
                moment(entry["slotAtMs"]),
                entry["jobName"],
                entry["status"] + (": late" if entry["late"] and entry["status"] != "missed" else ""),
                took(entry.get("durationMs")),
                " ".join((entry.get("error") or entry.get("summary") or "").split()),
            ]
            for entry in found
        ]
        show_table(columns, rows)


@cron.command()
@click.argument("what", metavar="SCHEDULE | ID")
@click.option("--count", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--tz", metavar="ZONE", help="IANA time zone.  [the user's]")
@client_command
def preview(what: str, count: int, tz: str | None, client: Client, as_json: bool) -> None:
    """Show when a schedule, or a job, comes next. Nothing is added.

    \b
    Examples:
      farhand cron preview '30 2 * * *' --tz Europe/Berlin
      farhand cron preview 'every 90 minutes'
      farhand cron preview 1f8a5c0e-6b0e-4f0e-9a53-0c6f1d6a7a11 --count 10
    """
    if len(what) == ID_LENGTH and what.count("-") == 4 and tz is None:
        answer = client.get(f"{_path(client, what)}/preview?count={count}")
    else:
        body = {"schedule": what, "count": count} | ({"tz": tz} if tz else {})
        answer = client.request("POST", "/v1/cron/preview", body)
    if as_json:
        show_answer(answer)
        return
    print(paint(plain(answer.value["scheduleHuman"]), bold=True))
    for slot in answer.value["slots"]:
        print(plain(slot["human"]))
    if not answer.value["slots"]:
        remark("it never comes again")


@cron.command()
@client_command
def status(client: Client, as_json: bool) -> None:
    """Whether the scheduler runs, and what is next."""
    answer = client.get("/v1/cron/status")
    if as_json:
        show_answer(answer)
        return
    value = answer.value
    show_fields(
        [
            ("scheduler", "on" if value["enabled"] else "off: [schedule] enabled = false"),
            ("jobs", f"{value['count']} of {value['maxJobs']}"),
            ("due", str(value["dueCount"])),
            ("running", f"{value['runningCount']} of {value['maxConcurrentRuns']}"),
            ("next", value.get("nextRunHuman", "nothing")),
            ("now", f"{value['currentTime']} ({value['timezone']})"),
        ]
    )
