"""Cut the link and kill each party of a transfer, over and over: the copy is whole, or the destination untouched."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import TwoNodes, wait_until

LONG = os.environ.get("FARHAND_SIEGE") == "long"
BREAKS = 500 if LONG else 20
# One transfer is broken so often, unless it ends before.
IN_A_ROW = 6
WAYS = ("cut left", "cut right", "kill left", "kill right", "kill gateway")
MIB = 1024 * 1024
WINDOW = 8 * MIB
SIZE = 24 * MIB


class Scene(TwoNodes):
    def begin(self, source: str, destination: str) -> str:
        body = {"source": source, "destination": destination, "background": True}
        answer = self.gateway.request("POST", "/v1/transfers", body)
        assert answer.status == 202, answer
        return str(answer.json()["id"])

    def state(self, transfer_id: str) -> Any:
        return self.gateway.get(f"/v1/transfers/{transfer_id}")

    def break_something(self, what: str) -> None:
        if what.startswith("cut"):
            self.proxies[what == "cut right"].cut()
        elif what == "kill gateway":
            self.gateway.kill()
            self.gateway.start()
        else:
            node = self.left if what == "kill left" else self.right
            node.kill()
            node.start(wait=False)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(tmp_path, stack)


@pytest.mark.siege
@pytest.mark.timeout(300 if not LONG else 3600)
def test_a_broken_transfer_ends_whole_or_leaves_the_destination_alone(scene: Scene) -> None:
    choice = random.Random(int(os.environ.get("FARHAND_SEED", "5")))
    ways = (way for _ in itertools.count() for way in choice.sample(WAYS, len(WAYS)))
    broken: list[str] = []
    for proxy in scene.proxies:
        proxy.pace = 0.02
    number = 0
    while len(broken) < BREAKS:
        number += 1
        folder = number % 3 == 0
        scene.proxies[0].refusing = number % 4 >= 2  # half of them go by the node sockets
        source = make_source(scene.left.workspace / f"source-{number}", choice, folder=folder)
        target = scene.right.workspace / f"target-{number}"
        if not folder:
            target.write_bytes(b"as it was")
        transfer_id = scene.begin(f"left:{source.name}", f"right:{target.name}")
        before = len(broken)
        for _ in range(IN_A_ROW):
            time.sleep(choice.uniform(0, 0.5))  # a random point is the purpose
            if scene.state(transfer_id)["state"] != "running":
                break
            broken.append(next(ways))
            scene.break_something(broken[-1])
            if not folder:
                assert digest(target) in (hashlib.sha256(b"as it was").digest(), digest(source)), broken[before:]
        end = scene.end_of(transfer_id)
        assert end["state"] == "ok", (end, broken[before:])
        assert fingerprint(target) == fingerprint(source), broken[before:]
        wait_until(lambda: not left_behind(scene), 30, "no partial file left behind")
        shutil.rmtree(source) if folder else source.unlink()
        shutil.rmtree(target) if folder else target.unlink()
    assert set(broken) == set(WAYS)
    print(f"transfers, broken {len(broken)} times in all: {number} tried, {number} held")


def test_a_node_that_stays_away_is_reported_and_the_destination_is_unchanged(scene: Scene) -> None:
    source = make_source(scene.left.workspace / "source", random.Random(7), folder=False)
    target = scene.right.workspace / "target"
    target.write_bytes(b"as it was")
    scene.proxies[1].pace = 0.2
    transfer_id = scene.begin(f"left:{source.name}", f"right:{target.name}")
    wait_until(lambda: partial_size(scene) > MIB, 30, "a MiB on the way")
    scene.left.kill()
    ended = scene.gateway.request("DELETE", f"/v1/transfers/{transfer_id}").json()
    assert ended["state"] == "cancelled" and ended["error"]["kind"] == "cancelled"
    assert target.read_bytes() == b"as it was"
    wait_until(lambda: not left_behind(scene), 30, "no partial file left behind")
    scene.left.start()


def make_source(path: Path, choice: random.Random, *, folder: bool) -> Path:
    content = choice.randbytes(SIZE // 4) * 4
    if not folder:
        path.write_bytes(content)
        return path
    path.mkdir()
    for piece in range(12):
        (path / f"{piece}.bin").write_bytes(content[piece * 2 * MIB : (piece + 1) * 2 * MIB - piece])
    return path


def left_behind(scene: Scene) -> list[Path]:
    return list(scene.right.workspace.rglob(".farhand-*.part"))


def test_received_bytes_are_not_sent_again(scene: Scene) -> None:
    """Whichever program is killed, no more than one window is sent twice."""
    source = scene.left.workspace / "big"
    source.write_bytes(os.urandom(96 * MIB))
    target = scene.right.workspace / "big"
    scene.proxies[1].pace = 0.02  # so that it is still in progress at the kill
    for kill in ("right", "left", "gateway"):
        target.unlink(missing_ok=True)
        before = scene.proxies[1].carried
        transfer_id = scene.begin("left:big", "right:big")
        wait_until(lambda: partial_size(scene) > 16 * MIB, 30, "16 MiB on the way")
        if kill == "gateway":
            scene.gateway.kill()
            held = partial_size(scene)
            scene.gateway.start()
        else:
            node = scene.right if kill == "right" else scene.left
            node.kill()
            held = partial_size(scene)
            node.start(wait=False)
        end = scene.end_of(transfer_id)
        assert end["state"] == "ok", end
        assert digest(target) == digest(source)
        carried = scene.proxies[1].carried - before
        assert held > 0
        assert carried <= 96 * MIB + WINDOW + MIB, (kill, held, carried)


def partial_size(scene: Scene) -> int:
    return sum(path.stat().st_size for path in scene.right.workspace.glob(".farhand-*.part"))


def digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def fingerprint(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": digest(path)}
    return {str(each.relative_to(path)): digest(each) for each in path.rglob("*") if each.is_file()}
