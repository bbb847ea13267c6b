"""The disk fails, or the process dies, at a chosen write or sync: the record tells the truth afterwards.

Twice: by hooks that need nothing of the system (tests/faults/preload), and by strace, which reaches every thread and
every file, and the node's own writes too.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.support.harness import ROOT, GatewayProcess, NodeProcess, Plugin, wait_until

LONG = os.environ.get("FARHAND_SIEGE") == "long"
pytestmark = [pytest.mark.siege, pytest.mark.timeout(1800 if LONG else 300)]
FINAL = {"ok", "error", "timeout", "cancelled", "denied", "unknown"}
CALLS = 6
AT_ONCE = 8

Arm = Callable[[], contextlib.AbstractContextManager[None]]


def ptrace_refused() -> str | None:
    """Why strace cannot be used here."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True, text=True)
    return f"strace cannot trace here: {tried.stderr.strip()[:200]}" if tried.returncode else None


@contextlib.contextmanager
def injected(pid: int, *faults: str) -> Iterator[None]:
    """While this lasts, system calls of a process fail, or kill it, as `faults` say: `fsync:error=EIO:when=2`."""
    names = ",".join(sorted({name for fault in faults for name in fault.partition(":")[0].split(",")}))
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid), "-e", f"trace={names}"]
    tracer = subprocess.Popen([*command, *(word for fault in faults for word in ("-e", f"inject={fault}"))])
    try:
        wait_until(lambda: traced(pid) or tracer.poll() is not None, 15, "strace is attached")
        # It ends well when the process has: struck by a write that was already on its way.
        assert tracer.poll() in (None, 0), "strace did not attach"
        yield
    finally:
        if tracer.poll() is None:
            tracer.terminate()
        try:
            tracer.wait(3)
        except subprocess.TimeoutExpired:  # it can miss the end of a process of several threads that it killed
            tracer.kill()
            tracer.wait(15)


def traced(pid: int) -> bool:
    """Every thread of it."""
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return bool(found) and not any("TracerPid:\t0" in status for status in found)


class Life:
    """A gateway that is struck again and again, a node that lives through it all, and what the gateway said."""

    def __init__(self, folder: Path, env: dict[str, str | None] | None = None) -> None:
        self.gateway = GatewayProcess(folder / "home", env={"FARHAND_BACKUP_EVERY_SECONDS": "0", **(env or {})})
        self.plugin = Plugin(self.gateway, folder, "worker")
        self.acknowledged: list[str] = []
        self.refused = self.lost = self.faults = self.struck = 0

    def __enter__(self) -> Life:
        self.gateway.start()
        self.plugin.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.plugin.stop()
        self.gateway.stop()

    def strike(self, arm: Arm) -> None:
        """Make calls while the fault is armed, then kill what is left, and start again."""
        for number in range(4):
            self._call(f"before {number}")
        before = self.refused + self.lost
        with arm():
            for number in range(CALLS):
                self._call(str(number))
            with ThreadPoolExecutor(AT_ONCE) as threads:  # many at once are written another way than one
                list(threads.map(self._call, map(str, range(CALLS, CALLS + 2 * AT_ONCE))))
        self.faults += 1
        self.struck += self.refused + self.lost > before
        assert self.gateway.process is not None
        if self.gateway.process.poll() is None:
            self.gateway.kill()
        else:
            assert self.gateway.process.stdout is not None
            self.gateway.process.stdout.close()
        self.gateway.start()
        self.gateway.wait_for_node("worker", seconds=60)

    def _call(self, said: str) -> None:
        body = {"tool": "worker.effect", "args": {"text": said}, "timeout_ms": 20_000}
        try:
            answer = self.gateway.request("POST", "/v1/tools/invoke", body)
        except (OSError, http.client.HTTPException):
            self.lost += 1
            return
        if answer.status == 200 and answer.json()["ok"]:
            self.acknowledged.append(answer.json()["request_id"])
        else:
            self.refused += 1

    def check(self, what: str) -> None:
        wait_until(lambda: not self.gateway.get("/v1/calls?state=running")["calls"], 60, "the end of every call")
        records: dict[str, Any] = {}
        before = ""
        while page := self.gateway.get(f"/v1/calls?limit=1000{before}")["calls"]:
            records.update((call["id"], call) for call in page)
            before = f"&before={page[-1]['id']}"
        starts = Counter(self.plugin.started())
        kept = sum(call in records and records[call]["state"] == "ok" for call in self.acknowledged)
        single = sum(count == 1 for count in starts.values())
        print(
            f"{what}: {self.faults} faults, {self.struck} of them felt; {len(self.acknowledged)} calls acknowledged, "
            f"{kept} held; {len(starts)} started, {single} once; {self.refused} refused, {self.lost} lost their line"
        )
        assert self.struck, "no fault was felt, so nothing was tried"
        assert kept == len(self.acknowledged) > 0
        assert single == len(starts) and set(starts) <= set(records), "what ran had been written down"
        assert {record["state"] for record in records.values()} <= FINAL
        plain_failures = [call for call, record in records.items() if record["state"] == "error"]
        assert not set(plain_failures) & set(starts), "a plain failure did not run"
        self.gateway.stop()
        assert apsw.Connection(str(self.gateway.home / "farhand.db")).pragma("integrity_check") == "ok"
        self.gateway.start()


def test_p1_p3_at_chosen_points_by_hooks(tmp_path: Path) -> None:
    order = tmp_path / "fault"
    numbers = range(1, 13) if LONG else (1, 4)
    points = [f"{where} {number} kill" for where in ("write", "sync") for number in numbers]
    points += [
        f"{where} {number} {what}"
        for where in ("write", "sync")
        for number in ((1, 3) if LONG else (2,))
        for what in ERRORS
    ]

    @contextlib.contextmanager
    def armed(point: str) -> Iterator[None]:
        order.write_text(point)
        try:
            yield
        finally:
            order.unlink()

    env: dict[str, str | None] = {"PYTHONPATH": str(ROOT / "tests" / "faults" / "preload"), "DISK_FAULT": str(order)}
    with Life(tmp_path, env) as life:
        for point in points:
            life.strike(lambda point=point: armed(point))
        life.check("kills and errors at chosen writes and syncs (hooks)")


ERRORS = ("EIO", "ENOSPC")
CALLS_TO_DISK = ("pwrite64", "fdatasync")


@pytest.mark.skipif(ptrace_refused() is not None, reason=str(ptrace_refused()))
def test_p1_p3_at_chosen_system_calls_by_strace(tmp_path: Path) -> None:
    numbers = range(1, 21) if LONG else (1, 4)
    faults = [f"{call}:signal=KILL:when={number}" for call in CALLS_TO_DISK for number in numbers]
    faults += [f"{call}:error={error}:when=2+" for call in CALLS_TO_DISK for error in ERRORS]
    with Life(tmp_path) as life:
        for fault in faults:
            assert life.gateway.process is not None
            pid = life.gateway.process.pid
            life.strike(lambda fault=fault, pid=pid: injected(pid, fault))
        life.check("kills and errors at chosen system calls (strace)")


@pytest.mark.skipif(ptrace_refused() is not None, reason=str(ptrace_refused()))
def test_p7_a_file_is_the_old_one_or_the_new_one_after_any_failure(gateway: GatewayProcess, tmp_path: Path) -> None:
    """A node writes, edits and is killed at each step of it."""
    renames = "rename,renameat,renameat2"
    faults = [f"{calls}:{what}" for calls in ("write", "fsync", renames) for what in ("error=EIO", "error=ENOSPC")]
    faults += ["fsync:signal=KILL", f"{renames}:signal=KILL"]
    old, new = "old " * 1000, "new " * 1000
    tried = held = 0
    with NodeProcess(gateway, tmp_path / "node", "disk") as node:
        place = node.workspace / "file"
        place.write_text(old)
        node.ok("Read", {"path": "file"})
        for fault in faults:
            place.write_text(old)
            # The third write and later ones: the first are the node's own words to its ledger and its log.
            when = ":when=1+" if fault.startswith("write") else ":when=1..2" if "error" in fault else ":when=1"
            with injected(node.pid, fault + when):
                answer = gateway.invoke("disk__Write", {"path": "file", "content": new}, timeout_ms=4000)
            content = place.read_text()
            left = sorted(path.name for path in node.workspace.iterdir() if path != place)
            tried += 1
            whole = content == (new if answer["ok"] else content) and content in (old, new)
            held += whole and (not left or "KILL" in fault)
            assert whole, (fault, answer, len(content))
            if node.process is not None and node.process.poll() is not None:
                node.start()
            else:
                node.restart()
    print(f"writes of a file under failing system calls: {tried} tried, {held} held")
    assert held == tried
