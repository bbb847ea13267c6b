"""What the folder engine promises beyond the contract: plain files, and no way out of their folders."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from farhand.protocol.errors import Failed, NotAllowed, NotFound
from farhand.store.objects.folder import FolderObjects


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("secret")
    return tmp_path / "home"


def test_objects_are_plain_files_that_can_be_edited(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        first = await objects.put("agents/main/notes/a.md", b"one")
        path = home / "agents" / "main" / "notes" / "a.md"
        assert path.read_bytes() == b"one"
        path.write_text("edited by hand")
        info, data = await objects.get("agents/main/notes/a.md")
        assert data == b"edited by hand" and info.etag != first.etag
        (home / "agents" / "main" / "dropped.txt").write_text("x")
        assert await objects.head("agents/main/dropped.txt") is not None

    asyncio.run(main())


def test_a_given_content_type_survives_a_restart_and_leaves_no_file_beside(home: Path) -> None:
    async def main() -> None:
        await FolderObjects(home).put("agents/main/x.py", b"1", content_type="text/html")
        again = FolderObjects(home)
        info = await again.head("agents/main/x.py")
        assert info is not None and info.content_type == "text/html"
        assert os.listdir(home / "agents" / "main") == ["x.py"]
        (home / "agents" / "main" / "x.py").write_text("something else")
        info = await again.head("agents/main/x.py")
        assert info is not None and info.content_type == "text/plain"
        await again.delete("agents/main/x.py")
        assert os.listdir(home / "object-types") == []

    asyncio.run(main())


def test_unfinished_writes_are_removed_at_the_next_start(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        await objects.put("agents/main/kept", b"kept")
        keys = ("agents/main/deep/er/x", "agents/main/kept", "skills/s/SKILL.md")
        writers = [await objects.open_write(key) for key in keys]
        for writer in writers:
            await writer.write(b"half")
        assert len(list(home.rglob(".farhand-*"))) == 2 * len(keys)
        FolderObjects(home)
        assert list(home.rglob(".farhand-*")) == [] and not (home / "agents" / "main" / "deep").exists()
        assert (home / "agents" / "main" / "kept").read_bytes() == b"kept"

    asyncio.run(main())


@pytest.mark.parametrize("target", ["/etc/passwd", "{home}/token", "{home}/agents/main/kept"])
def test_a_note_of_what_was_not_finished_leads_to_nothing_else(home: Path, target: str) -> None:
    (home / "agents" / "main").mkdir(parents=True)
    (home / "agents" / "main" / "kept").write_text("kept")
    (home / "object-writes").mkdir()
    (home / "object-writes" / ".farhand-0.tmp").symlink_to(target.format(home=home))
    FolderObjects(home)
    assert list((home / "object-writes").iterdir()) == []
    assert (home / "token").exists() and (home / "agents" / "main" / "kept").exists() and Path("/etc/passwd").exists()


@pytest.mark.parametrize("target", ["{home}/token", "/etc/passwd", "../../token", "../other/x"])
def test_a_link_out_of_an_agents_folder_is_refused(home: Path, target: str) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        await objects.put("agents/other/x", b"another agent's")
        await objects.put("agents/main/y", b"own")
        os.symlink(target.format(home=home), home / "agents" / "main" / "link")
        for attempt in (objects.head, objects.get, objects.open_read, objects.open_write):
            with pytest.raises(NotAllowed):
                await attempt("agents/main/link")  # type: ignore[operator]
        with pytest.raises(NotAllowed):
            await objects.put("agents/main/link", b"overwritten")
        assert [info.key for info in (await objects.list("agents/main/")).objects] == ["agents/main/y"]
        assert (home / "token").read_text() == "secret"
        assert (home / "agents" / "other" / "x").read_text() == "another agent's"

    asyncio.run(main())


def test_a_linked_folder_leads_nowhere_outside(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        await objects.put("agents/main/y", b"own")
        os.symlink(home, home / "agents" / "main" / "out")
        with pytest.raises(NotAllowed):
            await objects.get("agents/main/out/token")
        with pytest.raises(NotAllowed):
            await objects.put("agents/main/out/farhand.toml", b"x")
        with pytest.raises(NotAllowed):
            await objects.delete("agents/main/out/token")
        with pytest.raises(NotAllowed):
            await objects.list("agents/main/out/")
        assert (home / "token").read_text() == "secret"

    asyncio.run(main())


@pytest.mark.parametrize("space", ["agents/evil", "skills"])
def test_a_space_that_is_a_link_is_refused(home: Path, space: str) -> None:
    async def main() -> None:
        (home / "agents").mkdir()
        os.symlink(home, home / space)
        objects = FolderObjects(home)
        with pytest.raises(NotAllowed, match="is a link"):
            await objects.get(f"{space}/token")
        with pytest.raises(NotAllowed):
            await objects.put(f"{space}/token", b"x")
        with pytest.raises(NotAllowed):
            await objects.list(f"{space}/")

    asyncio.run(main())


def test_a_link_within_is_followed_and_its_removal_spares_the_target(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        await objects.put("agents/main/real.md", b"content")
        os.symlink("real.md", home / "agents" / "main" / "alias.md")
        assert (await objects.get("agents/main/alias.md"))[1] == b"content"
        listed = [info.key for info in (await objects.list("agents/main/")).objects]
        assert listed == ["agents/main/alias.md", "agents/main/real.md"]
        assert await objects.delete("agents/main/alias.md")
        assert (await objects.get("agents/main/real.md"))[1] == b"content"

    asyncio.run(main())


def test_a_path_that_is_not_a_regular_file_is_not_an_object(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        (home / "agents" / "main").mkdir(parents=True)
        os.mkfifo(home / "agents" / "main" / "pipe")
        assert await objects.head("agents/main/pipe") is None
        with pytest.raises(NotFound):
            await objects.get("agents/main/pipe")
        with pytest.raises(Failed):
            await objects.put("agents/main/pipe", b"x")
        assert (await objects.list("agents/main/")).objects == []

    asyncio.run(main())


def test_a_file_cannot_take_the_place_of_a_folder(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        await objects.put("agents/main/a/b", b"x")
        with pytest.raises(Failed, match="directory"):
            await objects.put("agents/main/a", b"y")
        with pytest.raises(Failed, match="directory"):
            await objects.put("agents/main/a/b/c", b"y")
        assert (await objects.get("agents/main/a/b"))[1] == b"x"

    asyncio.run(main())


def test_puts_and_deletes_in_one_folder_do_not_trip_over_each_other(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)

        async def come_and_go(name: str) -> None:
            for _ in range(30):
                await objects.put(f"agents/main/deep/down/{name}", b"x")
                assert await objects.delete(f"agents/main/deep/down/{name}")

        await asyncio.gather(*(come_and_go(str(number)) for number in range(6)))
        assert (await objects.list("agents/main/")).objects == []
        assert os.listdir(home / "agents" / "main") == []

    asyncio.run(main())


def test_a_writer_that_is_dropped_leaves_nothing(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        writer = await objects.open_write("agents/main/x")
        await writer.write(b"half")
        del writer

    asyncio.run(main())
    assert os.listdir(home / "agents" / "main") == []


def test_an_aborted_writer_leaves_no_folder(home: Path) -> None:
    async def main() -> None:
        writer = await FolderObjects(home).open_write("agents/main/deep/down/x")
        await writer.abort()

    asyncio.run(main())
    assert os.listdir(home / "agents" / "main") == []


def test_names_that_are_not_text_are_left_out(home: Path) -> None:
    async def main() -> None:
        objects = FolderObjects(home)
        await objects.put("agents/main/x", b"")
        (home / "agents" / "main" / os.fsdecode(b"bad-\xff")).write_text("")
        assert [info.key for info in (await objects.list("agents/main/")).objects] == ["agents/main/x"]

    asyncio.run(main())
