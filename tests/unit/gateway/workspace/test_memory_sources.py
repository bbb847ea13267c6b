from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from farhand.gateway.workspace.memory_sources import ObjectsSource, memory_sources
from farhand.machine.files import steering_files as steering
from farhand.memory.memory import Memory
from farhand.memory.sources import FolderSource
from farhand.protocol.errors import InvalidArgs, NotFound
from farhand.store.objects.folder import FolderObjects


def test_objects_are_listed_with_stamps_that_follow_their_content(tmp_path: Path) -> None:
    async def run() -> None:
        steering.allowed.set(True)
        objects = FolderObjects(tmp_path)
        source = ObjectsSource(objects, "main", "agents/main/")
        assert await source.listing() == {}
        for key in ("MEMORY.md", "SOUL.md", "memory/a.md", "memory/b.txt", "memory/deep/c.md", "memory/.d.md"):
            await objects.put(f"agents/main/{key}", b"one")
        await objects.put("agents/other/MEMORY.md", b"two")
        before = dict(await source.listing())
        assert list(before) == ["MEMORY.md", "memory/a.md"]
        await objects.put("agents/main/memory/a.md", b"three")
        after = await source.listing()
        assert after["MEMORY.md"] == before["MEMORY.md"]
        assert after["memory/a.md"] != before["memory/a.md"]
        assert await source.read("memory/a.md") == b"three"
        with pytest.raises(NotFound):
            await source.read("memory/none.md")

    asyncio.run(run())


def test_more_objects_than_a_page_holds_are_all_found(tmp_path: Path) -> None:
    async def run() -> None:
        objects = FolderObjects(tmp_path)
        folder = tmp_path / "agents" / "main" / "memory"
        folder.mkdir(parents=True)
        for number in range(1100):
            (folder / f"{number}.md").write_text(f"note {number}\n")
        source = ObjectsSource(objects, "main", "")
        assert len(await source.listing()) == 1100
        memory = Memory(tmp_path / "memory.db", lambda _: [source])
        assert (await memory.search("1099", agent="main")).hits[0].path == "memory/1099.md"
        await memory.close()

    asyncio.run(run())


def test_which_places_an_agent_remembers_from(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "work"
    own = home / "agents" / "main"
    own.mkdir(parents=True)
    elsewhere.mkdir()
    objects = FolderObjects(home)

    def places(workspace: Path, agent: str) -> list[tuple[str, str]]:
        return [
            (Path(source.name.partition(":")[2]).name, source.prefix)
            for source in memory_sources(home, workspace, objects)(agent)
        ]

    assert places(own, "main") == [("main", "")]
    assert places(own, "helper") == [("helper", "")]
    assert places(elsewhere, "main") == [("work", ""), ("main", "agents/main/")]
    assert places(elsewhere, "helper") == [("work", ""), ("helper", "agents/helper/")]
    link = tmp_path / "link"
    link.symlink_to(own)
    assert places(link, "main") == [("main", "")]
    for wrong in ("../main", "a/b", "", "..", "x\0"):
        with pytest.raises(InvalidArgs):
            memory_sources(home, own, objects)(wrong)
    assert isinstance(memory_sources(home, own, objects)("main")[0], FolderSource)
