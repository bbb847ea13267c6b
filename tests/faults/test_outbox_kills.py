"""Outboxes of four gateways on one store, killed over and over: nothing is sent twice, out of order, or lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.support.harness import wait_until

KILLS = 200 if os.environ.get("FARHAND_SIEGE") == "long" else 10
GATEWAYS = 4
PEERS = 5

OUTBOX = """
import asyncio, os, sys, time
from pathlib import Path
from farhand.gateway.messaging.channel import ChannelSettings
from farhand.gateway.messaging.outbox import Messages
from farhand.gateway.workspace.workspace import Workspace
from farhand.store.sqlite.store import SqliteStore
from farhand.store.objects.folder import FolderObjects
from farhand.store.tables.outbox import Place

effects = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Service:
    longest_text = 1000
    files_apart = True

    def __init__(self, kind, repeatable):
        self.settings = ChannelSettings(kind=kind, account="default")
        self.repeatable = repeatable

    async def send(self, message):
        os.write(effects, f"{message.place.channel} {message.place.peer} {message.text} {message.id}\\n".encode())
        await asyncio.sleep(0.01)
        return message.id

    async def typing(self, place): ...
    async def run(self, take): ...
    async def close(self): ...


async def main():
    database = SqliteStore.open(Path(sys.argv[1]))
    workspace = Workspace(FolderObjects(Path(sys.argv[1]).parent))
    clock = lambda: time.time_ns() // 1_000_000
    messages = Messages(database, workspace, clock=clock, lease_seconds=1.0, poll_seconds=0.1)
    messages.connect("once", Service("once", False))
    messages.connect("again", Service("again", True))
    await messages.start()
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        for peer in range(int(sys.argv[3])):
            for channel in ("once", "again"):
                name = f"{os.getpid()}-{number}-{peer}"
                await messages.accept(Place(channel, "default", str(peer)), name, message_id=name, origin="siege")
        await asyncio.sleep(0.1)
        while os.path.exists(sys.argv[4]):
            await asyncio.sleep(0.1)


asyncio.run(main())
"""


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.store = folder / "farhand.db"
        self.effects = folder / "effects"
        self.effects.touch()
        self.log = folder / "outboxes.log"
        self.script = folder / "outbox.py"
        self.script.write_text(OUTBOX)
        # While this exists, nothing more is accepted.
        self.quiet = folder / "quiet"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        arguments = [str(self.store), str(self.effects), str(PEERS), str(self.quiet)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(self.script), *arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", self.log.read_text()[-3000:]
        self.processes.append(process)

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
        self.processes.remove(process)

    def query(self, statement: str) -> list[Any]:
        connection = apsw.Connection(str(self.store))
        connection.set_busy_timeout(5000)
        try:
            return list(connection.execute(statement))
        finally:
            connection.close()

    def sent(self) -> list[tuple[str, str, str]]:
        lines = [line.split() for line in self.effects.read_text().splitlines()]
        return [(channel, peer, text) for channel, peer, text, _ in lines]


@pytest.mark.siege
@pytest.mark.timeout(3600 if KILLS > 10 else 300)
def test_one_of_many_gateways_sends_each_message_in_order(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        for _ in range(GATEWAYS):
            fleet.start()
        for _ in range(KILLS):
            before = len(fleet.sent())
            wait_until(lambda before=before: len(fleet.sent()) > before, 60, "messages to be sent")
            time.sleep(random.random() * 0.1)
            fleet.kill(random.choice(fleet.processes))
            fleet.start()
        fleet.quiet.touch()
        open_ones = "SELECT count(*) FROM outbox WHERE ended_at IS NULL"
        wait_until(lambda: fleet.query(open_ones) == [(0,)], 120, "every message to come to its end")
    finally:
        for process in list(fleet.processes):
            fleet.kill(process)

    rows = fleet.query("SELECT channel, peer, id, state FROM outbox ORDER BY seq")
    sent = fleet.sent()
    times = Counter(sent)
    states = Counter((channel, state) for channel, _, _, state in rows)
    print(f"\n{KILLS} kills of {GATEWAYS} gateways: {len(rows)} messages, {dict(states)}, {len(sent)} sent")
    for channel, peer, text, state in rows:
        count = times[channel, peer, text]
        if channel == "once":
            assert count <= 1, f"{text} was sent {count} times"
            assert state in ("sent", "unknown") and (state == "unknown" or count == 1), (text, state, count)
        else:  # the receiver can tell a repetition: nothing stays unknown
            assert state == "sent" and count >= 1, (text, state, count)
    assert set(times) <= {(channel, peer, text) for channel, peer, text, _ in rows}
    assert states["once", "sent"] > 5 * KILLS and states["once", "unknown"] <= KILLS * PEERS
    # Each peer got what it got in the order in which it was accepted.
    accepted: dict[tuple[str, str], list[str]] = defaultdict(list)
    for channel, peer, text, _ in rows:
        accepted[channel, peer].append(text)
    for place, texts in accepted.items():
        first = list(dict.fromkeys(text for channel, peer, text in sent if (channel, peer) == place))
        assert first == [text for text in texts if text in set(first)], place
    assert fleet.query("PRAGMA integrity_check") == [("ok",)]
    print(f"messages that were sent at most once and in order, {KILLS} kills: {len(rows)} tried, {len(rows)} held")
