"""`/undo` of the chat: restore the files that the calls of the last answer changed."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console
from rich.text import Text

from farhand.cli.client import Client, ClientError, url_path
from farhand.cli.output import plain, remark

MOST_CALLS: Final = 100
DIFF_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}


def undo_last(client: Client, key: str, console: Console) -> None:
    """Show what the last answer changed, and restore it after a confirmation. Raises ClientError."""
    session = client.get("/v1/sessions/{}", key).value
    history = client.get("/v1/sessions/{}/history", key, limit=200).value["messages"]
    asked = next((entry for entry in reversed(history) if entry["role"] == "user"), None)
    since = asked["at"] if asked else 0
    calls = client.get("/v1/calls", session_key=session["session_key"], limit=MOST_CALLS, bodies=0).value["calls"]
    found = []
    for call in (one for one in calls if one["created_at"] >= since and one["state"] == "ok"):
        changes = _changes(client, call["id"])
        if changes:
            found.append((call, changes))
    if not found:
        remark("the last answer changed no files that can be restored")
        return
    for call, changes in found:
        console.print(Text(f"{plain(call['tool'])}", style="bold"))
        for file in changes:
            console.print(Text(f"  would be {plain(file['action'])}: {plain(file['path'])}"), soft_wrap=True)
            for line in str(file.get("diff") or "").splitlines():
                console.print(Text(f"  {plain(line)}", style=DIFF_STYLES.get(line[:1], "dim")))
    try:
        answer = input(f"Restore {'these files' if len(found) > 1 or len(found[0][1]) > 1 else 'this file'}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        remark("nothing was restored")
        return
    for call, _ in found:  # the newest first
        ended = client.post(f"{url_path('/v1/calls/{}', call['id'])}/undo", {}).value
        if not ended["ok"]:
            raise ClientError(ended["error"]["kind"], ended["error"]["message"])
        remark(f"restored; to reverse it: farhand undo {ended['request_id']}")


def _changes(client: Client, call_id: str) -> list[dict[str, Any]]:
    """Return what undoing a call would do to each file; empty if it changed nothing."""
    try:
        ended: dict[str, Any] = client.post(f"{url_path('/v1/calls/{}', call_id)}/undo", {"dry_run": True}).value
    except ClientError as error:
        if error.code in ("not_found", "conflict", "invalid_request", "not_allowed"):
            return []
        raise
    return list(ended["result"]["files"]) if ended["ok"] else []
