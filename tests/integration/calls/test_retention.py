"""What is stored has limits: refused calls, and the history of calls and events; what remains is still verifiable."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import Answer, GatewayProcess, wait_until

MB = 1024 * 1024


def rows(gateway: GatewayProcess, query: str, *values: Any) -> list[Any]:
    store = apsw.Connection(str(gateway.home / "farhand.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        store.set_busy_timeout(5000)
        return list(store.execute(query, values))
    finally:
        store.close()


def stored_bytes(gateway: GatewayProcess) -> int:
    return sum(file.stat().st_size for file in gateway.home.glob("farhand.db*"))


def token(gateway: GatewayProcess, *options: str) -> str:
    return str(Command(gateway.home)("token", "create", *options, "--json").json()["token"])


def call(gateway: GatewayProcess, secret: str, tool: str, args: Any, **more: Any) -> Answer:
    headers = more.pop("headers", None)
    body = {"tool": tool, "args": args, **more}
    return gateway.request("POST", "/v1/tools/invoke", body, token=secret, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("refusals") / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(
        "[retention]\nrefused_calls_per_credential = 20\nkeyed_bytes_per_credential = 16384\n"
    )
    with GatewayProcess(home) as process:
        yield process


def test_a_refused_call_stores_a_digest_and_the_beginning_of_its_arguments(gateway: GatewayProcess) -> None:
    """S16: six denied calls of 8 MB took 100 MB."""
    narrow, before = token(gateway, "--scope", "tools.write"), stored_bytes(gateway)
    args = {"command": "x" * (8 * MB)}
    for _ in range(6):
        answer = call(gateway, narrow, "exec", args)
        assert answer.json()["state"] == "denied", answer
    assert stored_bytes(gateway) - before < MB
    kept = gateway.get(f"/v1/calls/{answer.json()['request_id']}")
    text = json.dumps(args)
    assert kept["args"]["_truncated"] is True
    assert kept["args"]["_original_bytes"] == len(text)
    assert kept["args"]["_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert text.startswith(kept["args"]["partial"]) and len(kept["args"]["partial"]) == 4096


def test_a_token_has_a_budget_for_calls_that_are_kept_for_their_key(gateway: GatewayProcess) -> None:
    """Calls with a key stay for a day however much the history takes, so one token could fill the disk with them."""
    narrow = token(gateway, "--scope", "tools.read")

    def listed(number: int, secret: str) -> Any:
        return call(gateway, secret, "ls", {"path": "."}, headers={"Idempotency-Key": f"key-{number}"}).json()

    answers = [listed(number, narrow) for number in range(40)]
    refused = [answer for answer in answers if not answer["ok"]]
    assert answers[0]["ok"] is True and answers[-1] in refused
    assert "keyed_bytes_per_credential (16384)" in refused[0]["error"]["message"]
    assert listed(0, narrow)["request_id"] == answers[0]["request_id"], "a repetition is still answered"
    assert call(gateway, narrow, "ls", {"path": "."}).json()["ok"] is True, "calls without a key are not counted"
    assert listed(41, gateway.token)["ok"] is True and listed(1, token(gateway, "--scope", "tools.read"))["ok"] is True


@pytest.mark.parametrize(
    ("tool", "args", "more"),
    [
        ("no_such_tool", {"x": "y" * MB}, {}),
        ("n" * MB, {}, {}),
        ("read", {"path": ["y" * MB]}, {}),
        ("read", {"path": "x"}, {"session_key": "s" * MB}),
        ("read", {"path": "x"}, {"agent_id": "s" * MB}),
    ],
)
def test_whatever_a_refused_call_holds_little_is_stored(
    gateway: GatewayProcess, tool: str, args: Any, more: dict[str, Any]
) -> None:
    secret, before = token(gateway, "--scope", "tools.write"), stored_bytes(gateway)
    answer = call(gateway, secret, tool, args, **more)
    assert answer.status == 400 or answer.json()["ok"] is False, answer
    assert len(answer.body) < 10_000
    assert stored_bytes(gateway) - before < MB // 2


def test_small_arguments_are_stored_whole(gateway: GatewayProcess) -> None:
    answer = call(gateway, token(gateway, "--scope", "tools.read"), "exec", {"command": "ls"})
    assert gateway.get(f"/v1/calls/{answer.json()['request_id']}")["args"] == {"command": "ls"}


def test_one_credential_fills_no_more_rows_than_its_budget(gateway: GatewayProcess) -> None:
    greedy, other = token(gateway, "--scope", "tools.read"), token(gateway, "--scope", "tools.read")
    for number in range(30):
        headers = {"Idempotency-Key": f"k{number}"} if number % 2 else None
        assert call(gateway, greedy, "exec", {"command": "ls"}, headers=headers).json()["state"] == "denied"
    (mine,) = {row[0] for row in rows(gateway, "SELECT credential FROM calls ORDER BY seq DESC LIMIT 1")}
    assert rows(gateway, "SELECT count(*) FROM calls WHERE credential = ?", mine) == [(20,)]
    assert call(gateway, other, "exec", {"command": "ls"}).json()["state"] == "denied"
    assert rows(gateway, "SELECT credential FROM calls ORDER BY seq DESC LIMIT 1") != [(mine,)]
    assert "refused without a record until tomorrow" in gateway.log.read_text()
    assert Command(gateway.home)("audit", "verify").status == 0


def test_one_credential_cannot_take_the_room_of_all_waiting_calls(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text('[[policy.rules]]\ntool = "exec"\ndecision = "ask"\n')
    with GatewayProcess(home) as gateway:
        greedy, other = token(gateway, "--scope", "tools.exec"), token(gateway, "--scope", "tools.exec")
        args = {"command": "x" * (12 * MB)}
        answers = [call(gateway, greedy, "exec", args, background=True).json() for _ in range(7)]
        assert [answer["state"] for answer in answers] == ["waiting"] * 5 + ["error"] * 2
        assert "bytes may wait" in answers[-1]["error"]["message"]
        assert call(gateway, other, "exec", {"command": "ls"}, background=True).json()["state"] == "waiting"


# -- history -------------------------------------------------------------------------------------------------------


def limited(home: Path, **settings: Any) -> GatewayProcess:
    home.mkdir(exist_ok=True)
    text = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (home / "farhand.toml").write_text(f"[retention]\n{text}")
    return GatewayProcess(home)


def verified(gateway: GatewayProcess) -> Any:
    reported = Command(gateway.home)("audit", "verify", "--json").json()
    assert reported["ok"] is True, reported["faults"]
    return reported


def filled(gateway: GatewayProcess, count: int, size: int = 200_000) -> list[str]:
    """Calls that fail quickly and are stored whole."""
    args = {"path": ".", "content": "x" * size}
    found = []
    for _ in range(count):
        answer = gateway.request("POST", "/v1/tools/invoke", {"tool": "write", "args": args}).json()
        assert answer["state"] == "error", answer
        found.append(answer["request_id"])
    return found


def pruned(gateway: GatewayProcess) -> Any:
    found = rows(gateway, "SELECT data FROM events WHERE kind = 'journal.pruned' ORDER BY id DESC LIMIT 1")
    return json.loads(found[0][0]) if found else None


def test_history_is_pruned_within_its_limit_and_stays_verifiable(tmp_path: Path) -> None:
    """Filled, pruned, verified, restarted, verified again."""
    keyed = {"Idempotency-Key": "again"}
    body = {"tool": "write", "args": {"path": "keyed", "content": "k"}}
    with limited(tmp_path / "home") as gateway:
        first = gateway.request("POST", "/v1/tools/invoke", body, headers=keyed).json()
        old = filled(gateway, 2)
        head = Command(gateway.home)("audit", "head").out.strip()
        filled(gateway, 38)
        filled(gateway, 150, 10)
    with limited(tmp_path / "home", history_mb=1) as gateway:
        reported = wait_until(lambda: pruned(gateway), 60, "something to be pruned")
        wait_until(lambda: rows(gateway, "SELECT sum(length(args)) FROM calls")[0][0] < MB, 60, "pruning")
        assert reported["calls"] > 0 and reported["broken"] is None
        assert gateway.request("GET", f"/v1/calls/{old[0]}").status == 404
        report = verified(gateway)
        assert any("was pruned by retention" in note["message"] for note in report["notes"])
        noted = Command(gateway.home)("audit", "verify", "--head", head, "--json").json()
        assert noted["ok"] and any("which was noted, was pruned" in note["message"] for note in noted["notes"])
        again = gateway.request("POST", "/v1/tools/invoke", body, headers=keyed).json()
        assert again["request_id"] == first["request_id"]
        assert "history" in Command(gateway.home)("doctor").out
    with limited(tmp_path / "home", history_mb=1) as gateway:
        verified(gateway)
        filled(gateway, 20)
        verified(gateway)


def has_pruned(gateway: GatewayProcess, before: int) -> bool:
    reported = pruned(gateway)
    return reported is not None and reported["events"] > before


def test_a_kill_in_the_middle_of_pruning_leaves_a_history_that_verifies(tmp_path: Path) -> None:
    with limited(tmp_path / "home") as gateway:
        filled(gateway, 60)
        filled(gateway, 150, 10)
    before = 0
    for _ in range(3):
        gateway = limited(tmp_path / "home", history_mb=1)
        gateway.start()
        wait_until(partial(has_pruned, gateway, before), 60, "some pruning")
        gateway.kill()
        before = pruned(gateway)["events"]
        verified(gateway)
        if rows(gateway, "SELECT sum(length(args)) FROM calls")[0][0] < MB:
            break
    with limited(tmp_path / "home", history_mb=1) as gateway:
        wait_until(lambda: rows(gateway, "SELECT sum(length(args)) FROM calls")[0][0] < MB, 60, "pruning")
        verified(gateway)


def test_events_that_anything_else_removed_are_still_missed(tmp_path: Path) -> None:
    with limited(tmp_path / "home") as gateway:
        filled(gateway, 20)
        filled(gateway, 150, 10)
    with limited(tmp_path / "home", history_mb=1) as gateway:
        reported = wait_until(lambda: pruned(gateway), 60, "something to be pruned")
        verified(gateway)
    change = "CAST(replace(data, '\"calls\":', '\"call\":') AS BLOB)"
    harms = [
        "DELETE FROM events WHERE id = (SELECT min(id) FROM events)",
        f"UPDATE events SET data = {change} WHERE kind = 'journal.pruned'",
        "DELETE FROM calls WHERE seq = (SELECT min(seq) FROM calls)",
        f"INSERT INTO events VALUES ({reported['through'] - 1}, 1, 'x', 'y', x'7b7d', NULL)",
        "DELETE FROM events WHERE kind = 'journal.pruned'",
    ]
    for number, harm in enumerate(harms):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(gateway.home, copy)
        store = apsw.Connection(str(copy / "farhand.db"))
        store.execute(harm)
        assert store.changes() == 1 or "journal.pruned" in harm
        store.close()
        found = Command(copy)("audit", "verify", "--json").json()
        assert found["ok"] is False, harm
