"""The journal is sealed: every change, removal or move in it, or in the records it describes, is detected."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from farhand.store.history.seal_coverage import Covers, rows_after
from farhand.store.history.verify import Report
from farhand.store.journal.events import append_event
from farhand.store.journal.seal import HEAD_FILE, KEY_FILE, Head, SealedJournal, load_key
from farhand.store.ports import StoreError, Tx
from farhand.store.sqlite.audit import verify
from farhand.store.sqlite.migrations import MIGRATIONS, SEALED
from farhand.store.sqlite.store import SqliteStore, SqliteTx
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, calls, text

NO_COPIES = {"FARHAND_BACKUP_EVERY_SECONDS": "0"}


def checked(home: Path, **options: Any) -> Report:
    return verify(home, home / "farhand.db", **options)


def change(home: Path, *statements: str) -> None:
    connection = apsw.Connection(str(home / "farhand.db"))
    try:
        for statement in statements:
            connection.execute(statement)
    finally:
        connection.close()


def rows(home: Path, query: str) -> list[Any]:
    connection = apsw.Connection(str(home / "farhand.db"))
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped home with calls that went well and badly, that read and wrote, and with a chat."""
    folder = tmp_path_factory.mktemp("lived")
    with ModelServer() as model:
        gateway = GatewayProcess(folder / "home", env={**NO_COPIES, **model.environment})
        with gateway, NodeProcess(gateway, folder / "node", "hands") as node:
            node.ok("Write", {"path": "a.txt", "content": "one"})
            node.ok("Read", {"path": "a.txt"})
            node.ok("Bash", {"command": "echo hello"})
            gateway.invoke("hands__Read", {"path": "missing"})
            gateway.invoke("no_such_tool", {})
            model.add(calls(("read", {"path": "a.txt"})), text("there is no such file"))
            gateway.request("POST", "/v1/sessions/main/messages", {"message": "look", "wait_seconds": 20})
            gateway.request("POST", "/v1/tokens", {"label": "t", "scopes": ["read"]})
            node.stop()
            gateway.wait_for_node("hands", online=False)
            later = {"when_online": True, "before": "in 1 hour"}
            ran, cancelled = (gateway.invoke("hands__Bash", {"command": "true"}, **later) for _ in range(2))
            gateway.request("DELETE", f"/v1/calls/{cancelled['request_id']}")
            node.start()
            over = f"/v1/calls/{ran['request_id']}"
            wait_until(lambda: gateway.get(over)["state"] == "ok", 30, "the call that waited")
            node.stop()
            gateway.wait_for_node("hands", online=False)
            assert gateway.invoke("hands__Bash", {"command": "true"}, **later)["state"] == "waiting"
    return folder / "home"


@pytest.fixture
def home(lived: Path, tmp_path: Path) -> Path:
    """A copy of it to do harm to."""
    return Path(shutil.copytree(lived, tmp_path / "home", ignore=shutil.ignore_patterns("jobs", "logs")))


def test_an_unchanged_journal_verifies(home: Path) -> None:
    done = Command(home)("audit", "verify", "--json")
    report = done.json()
    ((count, last),) = rows(home, "SELECT count(*), max(id) FROM events")
    ((recorded,),) = rows(home, "SELECT count(*) FROM calls")
    assert done.status == 0 and report["ok"] and report["fault"] is None and report["notes"] == [], report
    assert report["checked"] == count and report["calls"] == recorded >= 5
    assert report["head"].startswith(f"{last}:") and report["first"] == 1
    shown = Command(home)("audit", "verify")
    assert shown.status == 0 and f"{count} events and {recorded} calls checked: nothing was changed" in shown.out


LAST = "(SELECT max(id) FROM events)"
HARM = {
    "an event's data": "UPDATE events SET data = CAST(data || ' ' AS BLOB) WHERE kind = 'call.ended'",
    "an event's time": "UPDATE events SET at = at + 1 WHERE id = 5",
    "an event's kind": "UPDATE events SET kind = 'call.endet' WHERE kind = 'call.ended'",
    "an event's subject": "UPDATE events SET subject = 'x' WHERE id = 4",
    "a seal": f"UPDATE events SET hash = zeroblob(32) WHERE id = {LAST}",
    "no seal": "UPDATE events SET hash = NULL WHERE id = (SELECT min(id) FROM events WHERE hash IS NOT NULL)",
    "the first row gone": "DELETE FROM events WHERE id = 1",
    "the first rows gone": "DELETE FROM events WHERE id <= 4",
    "a row in the middle gone": "DELETE FROM events WHERE id = 7",
    "the last row gone": f"DELETE FROM events WHERE id = {LAST}",
    "the last rows gone": f"DELETE FROM events WHERE id > {LAST} - 3",
    "all rows gone": "DELETE FROM events",
    "two rows exchanged": """
        UPDATE events SET id = CASE id WHEN 5 THEN -6 ELSE -5 END WHERE id IN (5, 6);
        UPDATE events SET id = -id WHERE id < 0""",
    "the last row renumbered": f"UPDATE events SET id = id + 1 WHERE id = {LAST}",
    "a row added at the end": "INSERT INTO events (at, kind, subject, data) VALUES (1, 'x', 'y', x'7b7d')",
    "a row twice": """
        INSERT INTO events (at, kind, subject, data, hash) SELECT at, kind, subject, data, hash FROM events WHERE id = 3
        """,
    "arguments": "UPDATE calls SET args = CAST(replace(args, 'lo', 'p') AS BLOB) WHERE tool = 'hands__Bash'",
    "a result": "UPDATE calls SET result = CAST(replace(result, 'lo', 'p') AS BLOB) WHERE tool = 'hands__Bash'",
    "a result that was read": "UPDATE calls SET result = x'7b7d' WHERE tool = 'hands__Read' AND state = 'ok'",
    "a state": "UPDATE calls SET state = 'ok' WHERE state = 'error'",
    "an error": "UPDATE calls SET error_message = 'other' WHERE error_message IS NOT NULL",
    "who called": "UPDATE calls SET credential = 'somebody' WHERE seq = 2",
    "where it ran": "UPDATE calls SET node_id = 'elsewhere' WHERE node_id = 'hands'",
    "when it ran": "UPDATE calls SET ended_at = ended_at + 1 WHERE seq = 1",
    "a call's place": "UPDATE calls SET seq = seq + 1000 WHERE seq = (SELECT max(seq) FROM calls)",
    "a call gone": "DELETE FROM calls WHERE seq = 1",
    "a call made up": """
        CREATE TEMP TABLE copy AS SELECT * FROM calls WHERE seq = 1;
        UPDATE copy SET seq = 1000, id = 'made-up';
        INSERT INTO calls SELECT * FROM copy""",
    "what was said": "UPDATE entries SET message = CAST(replace(message, 'look', 'hook') AS BLOB)",
    "a message gone": "DELETE FROM entries WHERE seq = (SELECT max(seq) FROM entries)",
    "a message made up": """
        CREATE TEMP TABLE copy AS SELECT * FROM entries WHERE seq = 1;
        UPDATE copy SET seq = 1000;
        INSERT INTO entries SELECT * FROM copy""",
}


@pytest.mark.parametrize("what", HARM)
def test_each_kind_of_tampering_is_detected(home: Path, what: str) -> None:
    before = rows(home, "SELECT * FROM events"), rows(home, "SELECT * FROM calls"), rows(home, "SELECT * FROM entries")
    change(home, HARM[what])
    assert before != (
        rows(home, "SELECT * FROM events"),
        rows(home, "SELECT * FROM calls"),
        rows(home, "SELECT * FROM entries"),
    ), "the harm was done"
    report = checked(home)
    assert not report.ok and report.fault is not None and report.fault.message


def test_the_fault_is_named_with_its_event_and_the_status_is_1(home: Path) -> None:
    ((number, call_id),) = rows(
        home,
        "SELECT id, subject FROM events WHERE kind = 'call.started' "
        "AND CAST(data AS TEXT) LIKE '%hands__Bash%' LIMIT 1",
    )
    change(home, HARM["arguments"])
    done = Command(home)("audit", "verify", "--json")
    assert done.status == 1 and done.json()["ok"] is False
    fault = done.json()["fault"]
    assert fault["id"] <= number <= fault["last"] and call_id in fault["message"] and "was changed" in fault["message"]
    shown = Command(home)("audit", "verify")
    assert shown.status == 1 and call_id in shown.out and "1 wrong" in shown.out
    change(home, HARM["a row in the middle gone"])
    assert any("event 7 is missing" in fault.message for fault in checked(home).faults)


def _mutations(home: Path) -> Iterator[tuple[str, str]]:
    """Every field of every row, changed alone."""
    for table, key in (("events", "id"), ("calls", "seq"), ("entries", "seq")):
        columns = [(row[1], row[2]) for row in rows(home, f"PRAGMA table_info({table})")]
        for (number,) in rows(home, f"SELECT {key} FROM {table}"):
            for column, kind in columns:
                if column == key:
                    other = f"{column} + 100000"
                elif kind == "INTEGER":
                    other = f"coalesce({column} + 1, 1)"
                elif kind == "REAL":
                    other = f"coalesce({column} + 0.5, 1.5)"
                elif kind == "TEXT":
                    other = f"coalesce({column} || 'x', 'x')"
                else:
                    other = f"CAST(coalesce({column}, x'') || x'20' AS BLOB)"
                yield f"{table}.{column} of {number}", f"UPDATE {table} SET {column} = {other} WHERE {key} = {number}"


def test_a_change_of_any_field_is_detected(home: Path) -> None:
    connection = apsw.Connection(str(home / "farhand.db"))
    connection.pragma("journal_mode", "delete")
    connection.close()
    original = (home / "farhand.db").read_bytes()
    missed, tried = [], 0
    for what, statement in list(_mutations(home)):
        change(home, statement)
        tried += 1
        if checked(home).ok:
            missed.append(what)
        (home / "farhand.db").write_bytes(original)
    # Where and until when a call waits is not settled before it starts; what was asked for is.
    open_yet = {"route", "node_id", "capability", "node_boot", "deadline_at"}
    ((waiting,),) = rows(home, "SELECT seq FROM calls WHERE state = 'waiting'")
    assert tried > 300 and set(missed) <= {f"calls.{column} of {waiting}" for column in open_yet}


def seal_again(tx: SqliteTx) -> None:
    """Seal every row with the key of this journal."""
    covers, digest, last = Covers(tx), tx.journal.sealer.beginning, 0
    while page := rows_after(tx, last):
        for row in page:
            last, digest = row[0], tx.journal.sealer.hash(digest, [covers.with_row(row)])
            tx.execute("UPDATE events SET hash = ? WHERE id = ?", (digest, last))


def test_who_writes_the_database_alone_cannot_seal_it_again(home: Path) -> None:
    """Reseal every row after a change, as an attacker with the program and the database, but without the key, would."""
    change(home, "UPDATE calls SET result = x'7b7d' WHERE seq = 1")
    connection = apsw.Connection(str(home / "farhand.db"))
    (home / "forger").mkdir()
    journal = SealedJournal(load_key(home / "forger", make=True), home / "forger" / HEAD_FILE)
    seal_again(SqliteTx(connection, journal))
    connection.close()
    journal.close()
    shutil.copy(home / KEY_FILE, home / "kept")
    shutil.copy(home / "forger" / KEY_FILE, home / KEY_FILE)
    (home / HEAD_FILE).unlink()
    assert checked(home).ok, "it is well made: with its key it would pass"
    shutil.copy(home / "kept", home / KEY_FILE)
    assert not checked(home).ok


def test_a_noted_head_proves_that_everything_up_to_it_exists(home: Path) -> None:
    head = Command(home)("audit", "head").out.strip()
    assert head == checked(home).head
    assert Command(home)("audit", "verify", "--head", head).status == 0
    beyond = Command(home)("audit", "verify", "--from", "999999999")
    assert beyond.status == 1 and "there is no event 999999999 or later" in beyond.err
    gateway = GatewayProcess(home, env=NO_COPIES)
    with gateway:
        assert gateway.get("/v1/audit/head")["head"] == Command(home)("audit", "head", "--json").json()["head"]
        assert Command(home)("audit", "verify", "--head", head).status == 0, "while the gateway runs"
    other = f"{head.partition(':')[0]}:{'0' * 64}"
    differs = checked(home, noted=Head.parse(other)).fault
    assert differs is not None and "not the noted one" in differs.message
    gone = checked(home, noted=Head(10**9, bytes(32))).fault
    assert gone is not None and "not in the journal" in gone.message
    for wrong in ("x", "12", "12:zz", f"-1:{'0' * 64}"):
        done = Command(home)("audit", "verify", "--head", wrong, "--json")
        assert done.status == 2 and done.json()["error"]["code"] == "usage"


def test_from_an_event_on(home: Path) -> None:
    change(home, "UPDATE events SET at = at + 1 WHERE id = 3")
    assert not checked(home).ok
    ((sealed,),) = rows(home, "SELECT min(id) FROM events WHERE id >= 3 AND hash IS NOT NULL")
    report = checked(home, start=sealed + 4)
    assert report.ok and report.first is not None and report.first > sealed


def test_the_key_is_the_owners_alone_and_in_no_agents_reach(home: Path) -> None:
    assert (home / KEY_FILE).stat().st_mode & 0o777 == 0o600 == (home / HEAD_FILE).stat().st_mode & 0o777
    gateway = GatewayProcess(home, env=NO_COPIES)
    with gateway:
        refused = gateway.invoke("read", {"path": str(home / KEY_FILE)})
        assert not refused["ok"]
    (home / KEY_FILE).unlink()
    done = Command(home)("audit", "verify", "--json")
    assert done.status == 1 and KEY_FILE in done.json()["error"]["message"]


def test_a_journal_cut_while_stopped_stays_found_after_the_next_start(home: Path) -> None:
    ((last,),) = rows(home, "SELECT max(id) FROM events")
    change(home, HARM["the last rows gone"])
    check = {one["name"]: one for one in Command(home)("doctor", "--json").json()["checks"]}["journal"]
    assert check["status"] == "failed"
    gateway = GatewayProcess(home, env=NO_COPIES)
    with gateway:
        gateway.get("/v1/nodes")
    report = checked(home)
    assert report.fault is not None and report.fault.id == last + 1, "ids that were seen are not given again"
    assert "rows at its end were removed" in report.fault.message and f"instead of {last}:" in report.fault.message


def test_kills_leave_a_journal_that_verifies(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", env=NO_COPIES)
    for turn in range(5):
        gateway.start()
        with NodeProcess(gateway, tmp_path / "node", "hands") as node:
            started = [node.begin("Bash", {"command": "sleep 5"}) for _ in range(3)]
            node.ok("Write", {"path": "a.txt", "content": str(turn)})
            gateway.request("POST", "/v1/tokens", {"label": str(turn), "scopes": ["read"]})
            head = Head.parse(gateway.get("/v1/audit/head")["head"])
            gateway.kill()
            report = checked(gateway.home, noted=head)
            assert report.ok, report
            assert started
    report = checked(gateway.home)
    assert report.ok and report.notes == [], report


def test_verifying_while_calls_continue(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", env=NO_COPIES) as gateway:
        seen = 0
        for _ in range(8):
            for number in range(20):
                gateway.invoke("gsv__ReadFile", {"path": f"missing{number}"})

            def grown(seen: int = seen) -> int | None:  # the tables have a call a moment after its caller
                report = checked(gateway.home)
                assert report.ok, report
                return report.checked if report.checked > seen else None

            seen = wait_until(grown, 10, "more of the journal")


def test_a_restored_backup_is_reported_and_no_fault(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", env=NO_COPIES)
    command = Command(gateway.home)
    with gateway:
        gateway.request("POST", "/v1/tokens", {"label": "a", "scopes": ["read"]})
        assert command("backup", str(tmp_path / "b.tar.gz")).status == 0
        copied = Head.parse(gateway.get("/v1/audit/head")["head"]).id
        gateway.invoke("gsv__ReadFile", {"path": "x"})
        wait_until(lambda: Head.parse(gateway.get("/v1/audit/head")["head"]).id > copied, 10, "the call in the journal")
        noted = gateway.get("/v1/audit/head")["head"]
    assert command("restore", str(tmp_path / "b.tar.gz")).status == 0
    report = checked(gateway.home)
    assert report.ok and len(report.notes) == 1, report
    assert f"with events up to {copied}" in report.notes[0].message
    lost = checked(gateway.home, noted=Head.parse(noted)).fault
    assert lost is not None and "was lost when an earlier copy replaced the store" in lost.message
    with gateway:
        gateway.get("/v1/nodes")
    assert checked(gateway.home).ok
    other = Command(tmp_path / "other")
    assert other("restore", str(tmp_path / "b.tar.gz")).status == 0
    assert checked(tmp_path / "other").ok, "in another home, with the key of the archive"


def test_a_copy_of_another_home_is_named_as_such(home: Path, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "mine", env=NO_COPIES)
    gateway.start()
    gateway.stop()
    connection = apsw.Connection(str(home / "farhand.db"))
    connection.pragma("journal_mode", "delete")
    connection.close()
    assert Command(gateway.home)("restore", str(home / "farhand.db")).status == 0
    report = checked(gateway.home)
    assert report.ok and any("another key" in note.message for note in report.notes), report
    change(gateway.home, "UPDATE events SET at = at + 1 WHERE id = (SELECT max(id) FROM events)")
    assert not checked(gateway.home).ok, "what was written since is checked"


def test_a_damaged_store_that_was_set_aside_is_not_a_fault(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", env=NO_COPIES)
    gateway.start()
    gateway.stop()
    (gateway.home / "farhand.db").write_bytes(b"not a database at all\n" * 1000)
    gateway.start()
    gateway.stop()
    report = checked(gateway.home)
    assert report.ok and any("an empty store took its place" in note.message for note in report.notes), report


def test_a_store_from_before_the_first_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "farhand.db"
    connection = apsw.Connection(str(path))
    for step in MIGRATIONS[: MIGRATIONS.index(SEALED)]:
        connection.execute(step)
    connection.execute(f"PRAGMA user_version = {MIGRATIONS.index(SEALED)}")
    connection.execute("INSERT INTO events (at, kind, subject, data) VALUES (1, 'call.started', 'c1', x'7b7d')")
    connection.close()
    with pytest.raises(StoreError, match=r"before 0\.2\.0"):
        SqliteStore.open(path)
    connection = apsw.Connection(str(path))
    assert connection.pragma("user_version") == MIGRATIONS.index(SEALED)
    assert connection.execute("SELECT count(*) FROM events").fetchall() == [(1,)]
    connection.close()


def test_a_write_that_fails_leaves_no_gap(tmp_path: Path) -> None:
    def fails(store: Tx) -> None:
        append_event(store, 1, "never", "x", {})
        raise ValueError("no")

    async def run() -> None:
        database = SqliteStore.open(tmp_path / "x.db")
        writes = [
            database.write(lambda store: append_event(store, 1, "first", "x", {})),
            database.write(fails),
            database.write(lambda store: append_event(store, 1, "second", "x", {})),
        ]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert isinstance(results[1], ValueError)
        await database.close()

    asyncio.run(run())
    assert [row[0] for row in rows_of(tmp_path / "x.db")] == ["first", "second"]
    assert verify(tmp_path, tmp_path / "x.db").ok


def rows_of(path: Path) -> list[Any]:
    connection = apsw.Connection(str(path))
    try:
        return connection.execute("SELECT kind FROM events ORDER BY id").fetchall()
    finally:
        connection.close()


def test_doctor_looks_at_the_journals_end(home: Path) -> None:
    def check() -> Any:
        return {one["name"]: one for one in Command(home)("doctor", "--json").json()["checks"]}["journal"]

    assert check()["status"] == "ok"
    (home / KEY_FILE).chmod(0o644)
    assert check()["status"] == "failed"
