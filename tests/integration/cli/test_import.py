"""`farhand import openclaw`: a folder as OpenClaw documents it, and hostile ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import Outcome
from tests.support.harness import GatewayProcess

Command = Callable[..., Outcome]

SETTINGS = """// The settings are JSON5.
{
  agents: { defaults: { workspace: "~/.openclaw/workspace" } },
  channels: {
    telegram: { enabled: true, botToken: "123456:SECRET-TOKEN", dmPolicy: "allowlist", allowFrom: ["7654321"], },
    /* a second one */
    'whatsapp': { allowFrom: ["+4917"] },
  },
}
"""


@pytest.fixture
def openclaw(tmp_path: Path) -> Path:
    top = tmp_path / "openclaw"
    files = {
        "openclaw.json": SETTINGS,
        "workspace/AGENTS.md": "Be useful.\n",
        "workspace/SOUL.md": "Be kind.\n",
        "workspace/USER.md": "Alice.\n",
        "workspace/MEMORY.md": "The wifi password is hunter2.\n",
        "workspace/memory/2026-11-01.md": "We met.\n",
        "workspace/skills/notes/SKILL.md": "---\nname: notes\ndescription: Take notes.\n---\n",
        "workspace/.env": "KEY=SECRET-KEY\n",
        "workspace/.git/config": "x",
        "skills/summarize/SKILL.md": "---\nname: summarize\ndescription: Sum up.\n---\n",
        "credentials/whatsapp/creds.json": '{"key": "SECRET-CREDENTIAL"}',
        "agents/main/agent/auth-profiles.json": '{"key": "SECRET-PROFILE"}',
        "agents/main/sessions/abc.jsonl": '{"type":"session","id":"abc"}\n',
        "agents/main/sessions/sessions.json": "{}",
        "cron/jobs.json": json.dumps(
            {
                "version": 1,
                "jobs": [
                    {
                        "id": "1",
                        "name": "brief",
                        "enabled": True,
                        "schedule": {"kind": "cron", "expr": "0 7 * * *", "tz": "Europe/Berlin"},
                        "sessionTarget": "isolated",
                        "payload": {"kind": "agentTurn", "message": "Summarize the night."},
                        "delivery": {"mode": "announce", "channel": "telegram", "to": "7654321"},
                    },
                    {
                        "id": "2",
                        "name": "tea",
                        "enabled": False,
                        "schedule": {"kind": "every", "everyMs": 3_600_000},
                        "payload": {"kind": "systemEvent", "text": "Tea."},
                    },
                    {"id": "3", "name": "odd", "schedule": {"kind": "moon"}, "payload": {}},
                ],
            }
        ),
    }
    for name, content in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(content)
    return top


@pytest.fixture
def command(gateway: GatewayProcess) -> Command:
    def run(*words: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "farhand", *words],
            env={**os.environ, "FARHAND_HOME": str(gateway.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def workspace(gateway: GatewayProcess, path: str) -> bytes | None:
    answer = gateway.request("GET", f"/v1/workspace/main/{path}")
    return answer.body if answer.status == 200 else None


def jobs(gateway: GatewayProcess) -> dict[str, Any]:
    return {job["name"]: job for job in gateway.get("/v1/cron?includeDisabled=1")["jobs"]}


def test_everything_but_credentials_is_imported_once(openclaw: Path, gateway: GatewayProcess, command: Command) -> None:
    planned = command("import", "openclaw", str(openclaw), "--dry-run")
    assert planned.status == 0, planned
    assert "would import memory: main: MEMORY.md" in planned.out
    assert workspace(gateway, "SOUL.md") is None and jobs(gateway) == {}

    done = command("import", "openclaw", str(openclaw), "--json")
    assert done.status == 0, done
    report = json.loads(done.out)
    assert workspace(gateway, "AGENTS.md") == b"Be useful.\n"
    assert workspace(gateway, "memory/2026-11-01.md") == b"We met.\n"
    assert workspace(gateway, "openclaw/sessions/main/abc.jsonl") == b'{"type":"session","id":"abc"}\n'
    assert {skill["name"] for skill in gateway.get("/v1/skills?agent=main")["skills"]} >= {"notes", "summarize"}
    made = jobs(gateway)
    assert made["brief"]["schedule"]["expr"] == "0 7 * * *" and made["brief"]["spec"]["mode"] == "task"
    assert made["tea"]["enabled"] is False and "odd" not in made
    channels = workspace(gateway, "openclaw/channels.toml") or b""
    assert b'allow = ["7654321"]' in channels and b"[channels.whatsapp]" in channels

    for name in ("workspace/.env", "channels.telegram.botToken", "credentials", "auth-profiles.json"):
        assert any(name in line for line in report["secrets"]), name
    assert "SECRET" not in done.out + done.err and b"SECRET" not in channels
    assert workspace(gateway, ".env") is None and workspace(gateway, ".git/config") is None

    again = json.loads(command("import", "openclaw", str(openclaw), "--json").out)
    assert again["imported"] == [] and again["conflicts"] == []
    assert len(jobs(gateway)) == 2


def test_existing_files_are_replaced_only_with_force(openclaw: Path, gateway: GatewayProcess, command: Command) -> None:
    gateway.request("PUT", "/v1/workspace/main/SOUL.md", b"Mine.\n")
    first = command("import", "openclaw", str(openclaw))
    assert first.status == 1 and "main: SOUL.md" in first.err and "--force" in first.err
    assert workspace(gateway, "SOUL.md") == b"Mine.\n" and workspace(gateway, "USER.md") == b"Alice.\n"
    assert command("import", "openclaw", str(openclaw), "--force").status == 0
    assert workspace(gateway, "SOUL.md") == b"Be kind.\n"
    assert len(jobs(gateway)) == 2


def test_a_hostile_folder_reaches_nothing_outside(
    openclaw: Path, gateway: GatewayProcess, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "private.md").write_text("OUTSIDE")
    (openclaw / "workspace" / "link.md").symlink_to(tmp_path / "outside" / "private.md")
    (openclaw / "workspace" / "memory" / "more").symlink_to(tmp_path / "outside")
    (openclaw / "workspace-..").mkdir()
    (openclaw / "workspace-..").joinpath("x.md").write_text("x")
    os.mkfifo(openclaw / "workspace" / "pipe.md")
    with (openclaw / "workspace" / "huge.md").open("wb") as huge:
        huge.truncate(20 * 1024 * 1024)
    (openclaw / "openclaw.json").write_text("{ channels: [" + "[" * 5000)
    (openclaw / "cron" / "jobs.json").write_text("[" * 100_000)

    done = command("import", "openclaw", str(openclaw), "--json")
    assert done.status == 0, done
    report = json.loads(done.out)
    for name in ("link.md", "memory/more", "pipe.md", "huge.md", "workspace-..", "openclaw.json", "jobs.json"):
        assert any(name in line for line in report["skipped"]), name
    assert workspace(gateway, "link.md") is None and workspace(gateway, "memory/more/private.md") is None
    assert workspace(gateway, "SOUL.md") == b"Be kind.\n" and jobs(gateway) == {}


def test_another_folder_is_refused(command: Command, tmp_path: Path) -> None:
    done = command("import", "openclaw", str(tmp_path))
    assert done.status == 1 and "is not a folder of OpenClaw" in done.err
