"""`farhand migrate`: a home goes into a database and back, with everything it had."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from farhand.store.history.verify import verify_journal
from farhand.store.postgres.store import PostgresStore
from tests.support.fleet_servers import NatsServer, PostgresServer, fleet_environment
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess


def farhand(gateway: GatewayProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return run_process([*FARHAND, *words], env=gateway.environment, timeout=120)


def test_a_home_moves_into_a_fleet_and_back(
    tmp_path: Path, postgres: PostgresServer, nats: NatsServer, bucket: tuple[str, str]
) -> None:
    home = tmp_path / "home"
    url = postgres.new_database()
    env = fleet_environment(url, nats, bucket, tmp_path.name) | {"FARHAND_STORE_SECRET": None}
    objects = {name: value for name, value in env.items() if name.startswith("FARHAND_OBJECTS") and "URL" not in name}
    place = str(env["FARHAND_OBJECTS_URL"])

    def write(gateway: GatewayProcess, name: str) -> Any:
        return gateway.invoke("gsv__WriteFile", {"path": f"{name}.txt", "content": f"text of {name}"})

    with GatewayProcess(home, env=objects) as gateway:
        assert write(gateway, "first")["ok"]
        running = farhand(gateway, "migrate", "--to", url)
        assert running.returncode != 0 and "already running" in running.stderr
        token = gateway.request("POST", "/v1/tokens", {"label": "x", "scopes": ["read"]}).json()
    moved = farhand(gateway, "migrate", "--to", url, "--objects", place)
    assert moved.returncode == 0, moved.stderr
    assert "verified" in moved.stdout and postgres.PASSWORD not in moved.stdout + moved.stderr
    again = farhand(gateway, "migrate", "--to", url)
    assert again.returncode != 0 and "must be new" in again.stderr

    with GatewayProcess(home, env=env) as gateway:
        states = [call["state"] for call in gateway.get("/v1/calls")["calls"]]
        assert states == ["ok"]
        assert gateway.request("GET", "/v1/nodes", token=token["token"]).status == 200
        assert "text of first" in str(gateway.invoke("gsv__ReadFile", {"path": "first.txt"}))
        assert write(gateway, "second")["ok"]
        (home / "farhand.db").rename(home / "old.db")
        running = farhand(gateway, "migrate", "--to", "sqlite", "--home", str(home))
        assert running.returncode != 0
    store = PostgresStore.open(url, (home / "journal.key").read_bytes())
    report = store.query(lambda tx: verify_journal(tx, store.sealer, None))
    store.shut()
    assert report.faults == []

    back = farhand(gateway, "migrate", "--to", "sqlite")
    assert back.returncode == 0, back.stderr
    with GatewayProcess(home, env=objects) as gateway:
        assert "text of second" in str(gateway.invoke("gsv__ReadFile", {"path": "second.txt"}))
        assert len(gateway.get("/v1/calls")["calls"]) >= 3
    verified = farhand(gateway, "audit", "verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
