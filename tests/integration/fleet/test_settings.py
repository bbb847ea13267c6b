"""`farhand gateway` on PostgreSQL, NATS and S3: mistakes in the settings, and one gateway alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.fleet_servers import NatsServer, PostgresServer, fleet_environment, running_postgres
from tests.support.harness import GatewayProcess, Proxy, wait_until

SECRET = "pg-secret-word"
STORE = f"postgresql://farhand:{SECRET}@127.0.0.1:1/farhand"


def refused(home: Path, env: dict[str, str | None]) -> str:
    """Start a gateway that must not start; return what it says."""
    gateway = GatewayProcess(home, env=env)
    done = subprocess.run(
        gateway._command, env=gateway.environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode not in (0, None), done
    said = done.stdout + done.stderr
    assert SECRET not in said
    assert len(said.strip().splitlines()) == 1, said
    return said


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"FARHAND_STORE_URL": STORE}, "[bus] url"),
        ({"FARHAND_STORE_URL": STORE, "FARHAND_BUS_URL": "nats://127.0.0.1:1"}, "[objects] url"),
        ({"FARHAND_BUS_URL": "nats://127.0.0.1:1"}, "[store] url"),
        ({"FARHAND_STORE_URL": "mysql://x"}, "postgresql://"),
        ({"FARHAND_STORE_URL": STORE, "FARHAND_BUS_URL": "redis://x"}, "nats://"),
    ],
)
def test_incomplete_settings_are_one_line(tmp_path: Path, env: dict[str, str | None], expected: str) -> None:
    assert expected in refused(tmp_path / "home", env)


def test_servers_that_do_not_answer_are_one_line(
    tmp_path: Path, postgres: PostgresServer, nats: NatsServer, bucket: tuple[str, str]
) -> None:
    env = fleet_environment(STORE, nats, bucket, "x")
    assert "Connection refused" in refused(tmp_path / "a", env)
    wrong = env | {"FARHAND_STORE_URL": postgres.url("postgres", f"not-{SECRET}")}
    assert "password authentication failed" in refused(tmp_path / "b", wrong)
    lost = env | {"FARHAND_STORE_URL": postgres.new_database(), "FARHAND_BUS_URL": f"nats://u:{SECRET}@127.0.0.1:1"}
    assert "nats://127.0.0.1:1" in refused(tmp_path / "c", lost)
    database = postgres.new_database()
    away = env | {"FARHAND_STORE_URL": database, "FARHAND_OBJECTS_ENDPOINT": "http://127.0.0.1:1"}
    assert "cannot reach the objects s3://" in refused(tmp_path / "e", away)
    other = env | {"FARHAND_STORE_URL": database, "FARHAND_OBJECTS_URL": "s3://no-such-bucket/x"}
    assert "cannot reach the objects s3://no-such-bucket/x" in refused(tmp_path / "f", other)
    short = env | {"FARHAND_STORE_SECRET": "short"}
    assert "[store] secret" in refused(tmp_path / "d", short)


def test_a_home_with_other_secrets_is_refused(
    tmp_path: Path, postgres: PostgresServer, nats: NatsServer, bucket: tuple[str, str]
) -> None:
    env = fleet_environment(postgres.new_database(), nats, bucket, "y")
    with GatewayProcess(tmp_path / "one", env=env | {"FARHAND_STORE_SECRET": None}):
        said = refused(tmp_path / "two", env | {"FARHAND_STORE_SECRET": None})
        assert "journal.key" in said


def test_without_its_database_the_gateway_refuses_calls_and_resumes_by_itself(
    tmp_path: Path, nats: NatsServer, bucket: tuple[str, str]
) -> None:
    with running_postgres() as server:
        env = fleet_environment(server.new_database(), nats, bucket, "z")
        with GatewayProcess(tmp_path / "home", command="up", env=env) as gateway:
            node = wait_until(lambda: gateway.get("/v1/nodes")["nodes"], 60, "the node")[0]["node_id"]
            joined = gateway.wait_for_node(node)["connected_at"]
            assert gateway.invoke(f"{node}__Bash", {"command": "echo one"})["ok"]
            server.stop()
            answer = gateway.request("POST", "/v1/tools/invoke", {"tool": f"{node}__Bash", "args": {"command": "id"}})
            assert answer.status in (500, 503), answer
            assert b"not available" in answer.body and SECRET.encode() not in answer.body
            assert gateway.request("GET", "/readyz", token=None).status == 503
            assert gateway.request("GET", "/healthz", token=None).status == 200
            assert gateway.get("/v1/nodes")["nodes"][0]["online"]
            server.start()
            wait_until(lambda: gateway.request("GET", "/readyz", token=None).status == 200, 60, "ready")
            assert gateway.invoke(f"{node}__Bash", {"command": "echo two"})["ok"]
            assert gateway.wait_for_node(node)["connected_at"] == joined, "it stayed connected"


@pytest.mark.parametrize("how", ["stopped", "silent"])
def test_a_gateway_stops_although_its_database_does_not_answer(
    tmp_path: Path, nats: NatsServer, bucket: tuple[str, str], how: str
) -> None:
    with running_postgres() as server, Proxy(server.port) as relay:
        url = server.new_database().replace(f":{server.port}/", f":{relay.port}/")
        env = fleet_environment(url, nats, bucket, f"stop-{how}")
        with GatewayProcess(tmp_path / "home", command="up", env=env) as gateway:
            wait_until(lambda: gateway.get("/v1/nodes")["nodes"], 60, "the node")
            if how == "stopped":
                relay.cut(refuse=True)
            else:
                relay.freeze()
            assert gateway.stop() == 0, gateway.log.read_text()[-3000:]
