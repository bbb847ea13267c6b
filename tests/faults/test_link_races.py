"""Another process swaps files and folders for links while the tools of /agent/process read and write them.

Whatever the moment, what is outside is neither shown nor changed.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.files.local_paths import local_files
from farhand.machine.jobs.jobs import Jobs
from farhand.protocol.errors import ToolError
from farhand.tools.http_guide import GuideTools
from tests.support.harness import GatewayProcess, wait_until

pytestmark = pytest.mark.siege

LONG = os.environ.get("FARHAND_SIEGE") == "long"
TRIES = 1_000_000 if LONG else 20_000
WRITES = 100_000 if LONG else 2_000
REQUESTS = 100_000 if LONG else 800

AT_FDCWD, RENAME_EXCHANGE = -100, 2

INSIDE, SECRET = "inside", "SECRET-OUTSIDE"


def exchange(one: Path, other: Path) -> None:
    """Both names change places in one step, so that there is always something to find."""
    if ctypes.CDLL(None).renameat2(AT_FDCWD, bytes(one), AT_FDCWD, bytes(other), RENAME_EXCHANGE):
        raise OSError("renameat2 failed")


def swap_file(folder: Path, outside: Path) -> None:
    """`file` is now a file, now a link to a secret."""
    while True:
        (folder / "next").symlink_to(outside / "note")
        os.replace(folder / "next", folder / "file")
        (folder / "next").write_text(INSIDE)
        os.replace(folder / "next", folder / "file")


def swap_folder(folder: Path, outside: Path) -> None:
    """`door` is now a folder, now a link to another one, somewhere on the way to the file."""
    (folder / "trap").symlink_to(outside)
    while True:
        exchange(folder / "door", folder / "trap")


def swap_parent(folder: Path, outside: Path) -> None:
    """The same, one folder above: `high/door/note` is there inside and outside."""
    (folder / "trap").symlink_to(outside)
    while True:
        exchange(folder / "high", folder / "trap")


def swap_target(folder: Path, outside: Path) -> None:
    """`way` is a link all the time, now to a folder inside, now to one outside."""
    while True:
        (folder / "next").symlink_to(outside)
        os.replace(folder / "next", folder / "way")
        (folder / "next").symlink_to(folder / "door")
        os.replace(folder / "next", folder / "way")


RACES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "file": (swap_file, "file"),
    "folder": (swap_folder, "door/note"),
    "parent": (swap_parent, "high/door/note"),
    "target": (swap_target, "way/note"),
}


def furnish(folder: Path, outside: Path) -> None:
    for top, content in ((folder, INSIDE), (folder / "high", INSIDE), (outside, SECRET)):
        (top / "door").mkdir(parents=True)
        (top / "door" / "note").write_text(content)
    (outside / "note").write_text(SECRET)
    (folder / "file").write_text(INSIDE)
    (folder / "way").symlink_to(folder / "door")


@contextmanager
def swapping(name: str, folder: Path, outside: Path) -> Iterator[str]:
    """The path that is raced for."""
    swap, path = RACES[name]
    neighbour = multiprocessing.get_context("fork").Process(target=swap, args=(folder, outside), daemon=True)
    neighbour.start()
    try:
        yield path
        assert neighbour.is_alive()
    finally:
        neighbour.kill()
        neighbour.join()


def untouched(outside: Path) -> bool:
    names = sorted(str(path.relative_to(outside)) for path in outside.rglob("*"))
    return names == ["door", "door/note", "note"] and all(
        (outside / name).read_text() == SECRET for name in ("note", "door/note")
    )


@pytest.fixture(params=list(RACES))
def race(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ground(tmp_path: Path) -> tuple[Path, Path]:
    workspace, outside = tmp_path / "home" / "agents" / "main", tmp_path / "outside"
    furnish(workspace, outside)
    return workspace, outside


def test_no_read_shows_the_outside(ground: tuple[Path, Path], race: str, tmp_path: Path) -> None:
    workspace, outside = ground
    tools = GuideTools(local_files(workspace, tmp_path / "home", list), Jobs(tmp_path / "jobs"))
    counts: Counter[str] = Counter()
    with swapping(race, workspace, outside) as path:
        for _ in range(TRIES // len(RACES)):
            try:
                counts[tools.read_file(path=path)["content"]] += 1
            except ToolError as error:
                assert SECRET not in error.message
                counts[type(error).__name__] += 1
        # On a busy machine the neighbour may not have had its turn yet.
        wait_until(lambda: _refused(tools, path), 60, "the race is met")
    tried = sum(counts.values())
    print(f"reads while links are swapped: {tried} tried, {tried - counts[SECRET]} held")
    assert counts[SECRET] == 0 and counts[INSIDE] > 0, counts


def _refused(tools: GuideTools, path: str) -> bool:
    try:
        return bool(tools.read_file(path=path)["content"] == SECRET)
    except ToolError:
        return True


def test_no_write_reaches_the_outside(ground: tuple[Path, Path], race: str, tmp_path: Path) -> None:
    workspace, outside = ground
    tools = GuideTools(local_files(workspace, tmp_path / "home", list), Jobs(tmp_path / "jobs"))
    counts: Counter[str] = Counter()
    with swapping(race, workspace, outside) as path:
        acts: list[Callable[[int], Any]] = [
            lambda _: tools.update_file(path=path, content=INSIDE),
            lambda _: tools.update_file(path=path, content="", mode="append"),
            lambda _: tools.update_file(path=path, content=INSIDE, mode="append"),
            lambda number: tools.create_file(path=f"{os.path.dirname(path) or '.'}/new-{number}", content="new"),
            lambda number: tools.create_file(path=f"{os.path.dirname(path) or '.'}/made-{number}/x", content="new"),
        ]
        for number in range(WRITES // len(RACES)):
            try:
                counts["ok"] += bool(acts[number % len(acts)](number))
            except ToolError as error:
                counts[type(error).__name__] += 1
    tried = sum(counts.values())
    print(f"writes beside links that are swapped: {tried} tried, {tried if untouched(outside) else 0} held")
    assert untouched(outside) and counts["ok"] > 0, counts


def test_no_answer_of_agent_process_shows_the_outside(race: str, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        workspace, outside = gateway.home / "agents" / "main", tmp_path / "outside"
        furnish(workspace, outside)
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        headers = {"Authorization": f"Bearer {gateway.token}", "Content-Type": "application/json"}
        statuses: Counter[int] = Counter()
        with swapping(race, workspace, outside) as path:
            tool = {"name": "read_file", "input": {"path": path}}
            body = json.dumps({"session_id": "s", "user_id": "u", "biz_params": {"tool": tool}})
            for _ in range(REQUESTS // len(RACES)):
                connection.request("POST", "/agent/process", body, headers)
                response = connection.getresponse()
                statuses[response.status] += 1
                assert SECRET not in response.read().decode()
        connection.close()
    tried = sum(statuses.values())
    print(f"requests beside links that are swapped: {tried} tried, {tried} held")
    assert statuses[200] > 0 and set(statuses) <= {200, 403, 404, 500}, statuses
