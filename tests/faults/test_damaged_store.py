"""A store that is damaged, lost or emptied is set aside, the last good copy is opened, and the owner is informed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, wait_until
from tests.unit.store.sqlite.test_snapshots import spoil

OFTEN = {"FARHAND_BACKUP_EVERY_SECONDS": "0.2", "FARHAND_BACKUP_KEEP": "3"}


def copies(home: Path) -> list[Path]:
    return sorted((home / "backups").glob("farhand-*.db"))


def wait_for_copy(gateway: GatewayProcess) -> None:
    """A copy that has everything up to now."""
    now = int(time.time() * 1000)

    def copied() -> bool:
        gateway.invoke("gsv__ReadFile", {"path": "nothing"})  # an idle store is not copied
        return (gateway.get("/v1/health")["store"]["backup_at"] or 0) > now

    wait_until(copied, 20, "another copy")


def events(gateway: GatewayProcess, after: int = 0) -> list[Any]:
    text = gateway.request("GET", f"/v1/events?follow=0&last_event_id={after}").body.decode()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def lose(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(4096 * 4)


def garble(path: Path) -> None:
    path.write_bytes(b"not a database at all\n" * 1000)


@pytest.mark.siege
@pytest.mark.parametrize("damage", [spoil, lose, empty, cut, garble])
def test_p11_the_last_good_copy_is_opened_and_reported(tmp_path: Path, damage: Any) -> None:
    with GatewayProcess(tmp_path / "home", env=OFTEN) as gateway:
        kept = gateway.request("POST", "/v1/tokens", {"label": "kept", "scopes": ["read"]}).json()
        gone = gateway.request("POST", "/v1/tokens", {"label": "gone", "scopes": ["read"]}).json()
        wait_for_copy(gateway)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in copies(gateway.home))
    gateway = GatewayProcess(tmp_path / "home", env={"FARHAND_BACKUP_EVERY_SECONDS": "0"})
    with gateway:  # what happens from here on is in no copy
        gateway.request("DELETE", f"/v1/tokens/{gone['id']}")
        seen = events(gateway)[-1]["id"]
    damage(gateway.home / "farhand.db")
    gateway.start()
    try:
        health = gateway.get("/v1/health")
        recovery = health["store"]["recovery"]
        assert health["status"] == "ok" and recovery["backup"] and recovery["backup_at"]
        aside = Path(recovery["set_aside"])
        assert (aside / "farhand.db").exists() or damage is lose, "what was damaged is kept"
        reported = [event for event in events(gateway, seen) if event["kind"] == "store.recovered"]
        assert len(reported) == 1, "an earlier reader of the journal gets the event"
        assert "damaged" in gateway.log.read_text()
        assert gateway.request("GET", "/v1/nodes", token=kept["token"]).status == 200
        refused = gateway.request("GET", "/v1/nodes", token=gone["token"])
        assert refused.status == 401, "what was revoked since the copy stays revoked"
        check = {one["name"]: one for one in Command(gateway.home)("doctor", "--json").json()["checks"]}["store"]
        assert check["status"] == "warning" and str(aside) in check["message"]
        print(f"a damaged store ({damage.__name__}): 1 tried, 1 held")
    finally:
        gateway.stop()


def test_p11_without_any_copy_it_begins_empty_and_says_so(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", env={"FARHAND_BACKUP_EVERY_SECONDS": "0"})
    gateway.start()
    gateway.stop()
    garble(gateway.home / "farhand.db")
    gateway.start()
    try:
        recovery = gateway.get("/v1/health")["store"]["recovery"]
        assert recovery["backup"] is None and (Path(recovery["set_aside"]) / "farhand.db").exists()
    finally:
        gateway.stop()


def test_copies_are_rotated_and_an_idle_store_is_not_copied_again(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", env=OFTEN) as gateway:
        for _ in range(5):
            wait_for_copy(gateway)
        wait_until(lambda: len(copies(gateway.home)) == 3, 10, "three copies")
        assert gateway.get("/v1/health")["store"]["backup_at"] > 0


def test_backup_and_restore_through_the_command_with_the_gateway_running(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        command = Command(gateway.home)
        gateway.request("PUT", "/v1/workspace/main/notes.md", b"remember", headers={"Content-Type": "text/markdown"})
        token = gateway.request("POST", "/v1/tokens", {"label": "t", "scopes": ["read"]}).json()["token"]
        done = command("backup", str(tmp_path / "b.tar.gz"), "--json")
        assert done.status == 0 and done.json()["files"] >= 3, done
        assert command("backup", str(tmp_path / "b.tar.gz")).status == 1, "nothing is overwritten"
        refused = command("restore", str(tmp_path / "b.tar.gz"), "--json")
        assert refused.status == 1 and "already running" in refused.json()["error"]["message"]
    done = Command(tmp_path / "other")("restore", str(tmp_path / "b.tar.gz"))
    assert done.status == 0, done
    with GatewayProcess(tmp_path / "other") as other:
        assert other.token == (tmp_path / "home" / "token").read_text().strip()
        assert other.request("GET", "/v1/workspace/main/notes.md").body == b"remember"
        assert other.request("GET", "/v1/nodes", token=token).status == 200
    assert Command(tmp_path / "nothing")("backup", str(tmp_path / "c.tar.gz")).status == 1
