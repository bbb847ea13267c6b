"""`python -m tests.support.siege_gateway`: `farhand gateway` with places where a fault can be put, and without a guard.

A fault is asked for by a file in the home, which the first to come there removes:

    pause-commit   a transaction has passed its guards and is not committed: the writer thread stands still
    pause-send     a call is committed and its frame not sent: the whole gateway stands still
    pause-answer   a node has answered and nothing is recorded: the whole gateway stands still
    pause-start    a waiting call is about to be recorded as started: only that call stands still
    repeat-end     a call has ended: another end of it is written, as by a gateway that has not heard of it

The first four hold the seconds. `SIEGE_MUTANT` in the environment names a guard that is taken out, to see whether the
checker notices. `frames` in the home lists the calls whose frames left, and the connections that they were for; the
table `siege_late_writes` has the gateways that wrote after others had taken over their work.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from farhand.api.node_socket.services import NodeServices
from farhand.cli.main import main
from farhand.gateway.calls import gate
from farhand.gateway.calls.lifecycle import Lifecycle
from farhand.gateway.calls.open_call import OpenCall
from farhand.gateway.calls.recorder import Recorder
from farhand.gateway.calls.waiting import WaitingCalls
from farhand.protocol.messages import ToolResponse
from farhand.store.postgres.store import PostgresStore
from farhand.store.tables import calls, fleet, waiting_calls
from farhand.store.tables.calls import CallState

HOME = Path(os.environ["FARHAND_HOME"])


def show_tasks() -> None:
    """Print where every thread and task is, each time the file `show-tasks` appears in the home."""
    while True:
        time.sleep(1)
        if (HOME / "show-tasks").exists():
            (HOME / "show-tasks").unlink()
            faulthandler.dump_traceback(all_threads=True)
            for task in list(getattr(asyncio.tasks, "_all_tasks", ())):
                task.print_stack(file=sys.stderr)
            sys.stderr.flush()


def asked(what: str) -> float | None:
    """Return the seconds in the file that asks for a fault, once."""
    path = HOME / what
    try:
        seconds = float(path.read_text())
        path.unlink()
    except (OSError, ValueError):
        return None
    return seconds


def pause(point: str) -> None:
    if (seconds := asked(f"pause-{point}")) is not None:
        time.sleep(seconds)


def before(kind: type, name: str, act: Callable[..., None]) -> None:
    original = getattr(kind, name)

    def replaced(self: Any, *arguments: Any, **options: Any) -> Any:
        act(*arguments)
        return original(self, *arguments, **options)

    setattr(kind, name, replaced)


def at_answer(_connection: object, message: object) -> None:
    if isinstance(message, ToolResponse):
        pause("answer")


def note_frame(frames: int, opened: OpenCall) -> None:
    pause("send")
    if opened.connection is not None:
        os.write(frames, f"{opened.record.id} {opened.connection.socket}\n".encode())


def note_late_writes() -> None:
    """Note transactions of this gateway that are committed after others have taken over its work."""
    original = PostgresStore._end

    def replaced(self: PostgresStore, durable: bool) -> None:
        pause("commit")
        if self._member is not None:
            replica, epoch = self._member
            late = f"SELECT id FROM replicas WHERE id = '{replica}' AND epoch <> {epoch:d}"
            self._connection.execute(f"INSERT INTO siege_late_writes {late}")
        original(self, durable)

    PostgresStore._end = replaced  # type: ignore[method-assign]


def hold_starts() -> None:
    original = WaitingCalls._send

    async def replaced(self: WaitingCalls, *arguments: Any) -> None:
        if (seconds := asked("pause-start")) is not None:
            await asyncio.sleep(seconds)
        await original(self, *arguments)

    WaitingCalls._send = replaced  # type: ignore[method-assign]


def repeat_ends() -> None:
    original = Recorder._ended

    def replaced(self: Recorder, ending: Any, error: BaseException | None) -> None:
        original(self, ending, error)
        if error is None and ending.end.stored_as == "running" and asked("repeat-end") is not None:
            record = ending.end.record
            other = msgspec.structs.replace(
                record, state=CallState.UNKNOWN, result=None, ended_at=(record.ended_at or 0) + 1
            )
            end = msgspec.structs.replace(ending.end, record=other)
            self._write([], [msgspec.structs.replace(ending, end=end)])

    Recorder._ended = replaced  # type: ignore[method-assign]


# -- guards that are taken out ------------------------------------------------------------------------------


def unguarded(statement: str) -> str:
    return (
        statement.replace(" AND state = 'waiting'", "")
        .replace(" AND ended_at IS NULL", "")
        .replace(" AND calls.ended_at IS NULL", "")
    )


def without_generation() -> None:
    for module in (fleet, gate, waiting_calls):
        module.check_link = lambda *_: None  # type: ignore[attr-defined]


def without_epoch() -> None:
    original = PostgresStore._begin

    def replaced(self: PostgresStore) -> None:
        member, self._member = self._member, None
        try:
            original(self)
        finally:
            self._member = member

    PostgresStore._begin = replaced  # type: ignore[method-assign]


def without_first_end() -> None:
    calls.FINISH = unguarded(calls.FINISH)  # type: ignore[misc]
    calls.FINISH_ALL = unguarded(calls.FINISH_ALL)  # type: ignore[misc]


def without_tombstone() -> None:
    calls.START = unguarded(calls.START)  # type: ignore[misc]


# The ledger of a node is taken out in `siege_node`.
MUTANTS: dict[str, Callable[[], None]] = {
    "generation": without_generation,
    "epoch": without_epoch,
    "first end": without_first_end,
    "tombstone": without_tombstone,
}


if __name__ == "__main__":
    HOME.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(HOME / "frames", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    note_late_writes()
    before(Lifecycle, "_send", lambda opened: note_frame(file, opened))
    before(NodeServices, "handle", at_answer)
    hold_starts()
    repeat_ends()
    if (guard := os.environ.get("SIEGE_MUTANT", "")) in MUTANTS:
        MUTANTS[guard]()
    threading.Thread(target=show_tasks, daemon=True).start()
    main()
