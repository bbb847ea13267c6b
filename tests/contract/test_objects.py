"""The contract of the object store: one suite, run on every engine."""

from __future__ import annotations

import asyncio
import os
import resource
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from farhand.protocol.errors import Failed, InvalidArgs, NotFound
from farhand.store.objects.base import Conflict, Objects, check_key, content_type_of
from farhand.store.objects.folder import FolderObjects
from farhand.store.objects.s3 import S3Objects

Check = Callable[[Objects], Awaitable[None]]


@asynccontextmanager
async def folder_engine(tmp_path: Path) -> AsyncIterator[Objects]:
    home = tmp_path / "home"
    home.mkdir()
    objects = FolderObjects(home)
    yield objects
    await objects.close()


@asynccontextmanager
async def s3_engine(bucket: tuple[str, str]) -> AsyncIterator[Objects]:
    url, endpoint = bucket
    settings = {"endpoint": endpoint, "access_key_id": "any", "secret_access_key": "any"}
    objects = S3Objects(f"{url}/{uuid.uuid4().hex}", **settings)
    yield objects
    await objects.close()


@pytest.fixture(params=["folder", "s3"])
def on_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Check], None]:
    """Runs a check on a fresh store of each engine."""
    server = request.getfixturevalue("bucket") if request.param == "s3" else None

    def run(check: Check) -> None:
        async def main() -> None:
            async with folder_engine(tmp_path) if server is None else s3_engine(server) as objects:
                await check(objects)

        asyncio.run(main())

    return run


async def fill(objects: Objects, *keys: str) -> None:
    for key in keys:
        await objects.put(key, key.encode())


async def keys(objects: Objects, prefix: str, **options: Any) -> list[str]:
    """Every key and prefix, through all pages."""
    found: list[str] = []
    after: str | None = None
    while True:
        page = await objects.list(prefix, after=after, **options)
        found += sorted([info.key for info in page.objects] + page.prefixes)
        after = page.after
        if after is None:
            return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- one object -----------------------------------------------------------------------------------------------------


def test_a_stored_object_can_be_read(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        data = bytes(range(256)) * 10
        put = await objects.put("agents/main/notes/a.md", data)
        info, got = await objects.get("agents/main/notes/a.md")
        assert got == data
        assert info == put == await objects.head("agents/main/notes/a.md")
        assert (info.key, info.size, info.content_type) == ("agents/main/notes/a.md", 2560, "text/markdown")

    on_engine(check)


def test_an_empty_object_is_an_object(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("skills/empty", b"")
        info, data = await objects.get("skills/empty")
        assert (info.size, data) == (0, b"")
        assert await keys(objects, "skills/") == ["skills/empty"]

    on_engine(check)


@pytest.mark.parametrize(
    "key",
    [
        "agents/main/ä ö/ü.md",
        "agents/main/日本.txt",
        "agents/main/100%.txt",
        "agents/main/a+b=c&d?.txt",
        "skills/#x~'\"",
        "agents/main/\U0001f469\u200d\U0001f680.md",
        "agents/main/1.00.00\u202fPM.png",
    ],
)
def test_any_printable_name_will_do(on_engine: Callable[[Check], None], key: str) -> None:
    async def check(objects: Objects) -> None:
        await objects.put(key, b"x")
        assert (await objects.get(key))[1] == b"x"
        assert await keys(objects, key.rpartition("/")[0] + "/") == [key]
        assert await objects.delete(key)
        assert await objects.head(key) is None

    on_engine(check)


def test_what_is_not_there(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        assert await objects.head("agents/main/none") is None
        assert await objects.delete("agents/main/none") is False
        with pytest.raises(NotFound, match="agents/main/none"):
            await objects.get("agents/main/none")
        with pytest.raises(NotFound, match="agents/main/none"):
            await objects.open_read("agents/main/none")
        assert await keys(objects, "agents/main/none/") == []

    on_engine(check)


def test_a_prefix_is_not_an_object(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await fill(objects, "agents/main/a/b")
        assert await objects.head("agents/main/a") is None
        assert await objects.delete("agents/main/a") is False
        with pytest.raises(NotFound):
            await objects.get("agents/main/a")
        assert await objects.head("agents/main/a/b/c") is None
        assert (await objects.get("agents/main/a/b"))[1] == b"agents/main/a/b"

    on_engine(check)


def test_put_replaces(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        first = await objects.put("agents/main/x", b"one")
        second = await objects.put("agents/main/x", b"two")
        assert first.etag != second.etag
        assert (await objects.get("agents/main/x"))[1] == b"two"

    on_engine(check)


def test_delete_removes_and_leaves_no_prefix(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await fill(objects, "agents/main/a/b/c", "agents/main/d")
        assert await objects.delete("agents/main/a/b/c") is True
        assert await objects.head("agents/main/a/b/c") is None
        assert await keys(objects, "agents/main/", delimiter=True) == ["agents/main/d"]
        await objects.put("agents/main/a/b", b"now an object")
        assert (await objects.get("agents/main/a/b"))[1] == b"now an object"

    on_engine(check)


# -- content types and times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.md", "text/markdown"),
        ("a.MD", "text/markdown"),
        ("a.json", "application/json"),
        ("a.yaml", "text/yaml"),
        ("a.yml", "text/yaml"),
        ("a.txt", "text/plain"),
        ("Makefile", "text/plain"),
        ("a.html", "text/plain"),
        ("a.png", "image/png"),
        ("a.pdf", "application/pdf"),
        ("a.tar.gz", "application/gzip"),
        ("a.whatever", "text/plain"),
        ("md", "text/plain"),
    ],
)
def test_the_extension_tells_the_content_type(name: str, expected: str) -> None:
    assert content_type_of(f"agents/main/{name}") == expected


def test_a_content_type_that_was_given_is_kept(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("agents/main/page", b"<p>", content_type="text/html")
        info = await objects.head("agents/main/page")
        assert info is not None and info.content_type == "text/html"
        await objects.put("agents/main/page", b"plain")
        info = await objects.head("agents/main/page")
        assert info is not None and info.content_type == "text/plain"

    on_engine(check)


def test_times_go_forward(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        first = await objects.put("agents/main/x", b"1")
        second = await objects.put("agents/main/x", b"2")
        assert 1_700_000_000_000 < first.modified_at <= second.modified_at
        listed = (await objects.list("agents/main/")).objects[0]
        assert (listed.key, listed.size, listed.etag) == ("agents/main/x", 1, second.etag)
        assert abs(listed.modified_at - second.modified_at) < 1000

    on_engine(check)


# -- conditions -----------------------------------------------------------------------------------------------------


def test_put_if_absent(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("agents/main/x", b"first", if_absent=True)
        with pytest.raises(Conflict, match="agents/main/x"):
            await objects.put("agents/main/x", b"second", if_absent=True)
        assert (await objects.get("agents/main/x"))[1] == b"first"

    on_engine(check)


def test_a_refused_put_leaves_the_content_type(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("agents/main/x", b"first", content_type="text/html")
        with pytest.raises(Conflict):
            await objects.put("agents/main/x", b"second", content_type="text/css", if_absent=True)
        info, data = await objects.get("agents/main/x")
        assert (info.content_type, data) == ("text/html", b"first")

    on_engine(check)


def test_put_and_delete_if_match(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        first = await objects.put("agents/main/x", b"1")
        second = await objects.put("agents/main/x", b"2", if_match=first.etag)
        with pytest.raises(Conflict, match="agents/main/x"):
            await objects.put("agents/main/x", b"3", if_match=first.etag)
        with pytest.raises(Conflict, match="agents/main/x"):
            await objects.delete("agents/main/x", if_match=first.etag)
        assert (await objects.get("agents/main/x"))[1] == b"2"
        assert await objects.delete("agents/main/x", if_match=second.etag) is True
        assert await objects.delete("agents/main/x", if_match=second.etag) is False
        with pytest.raises(Conflict):
            await objects.put("agents/main/x", b"4", if_match=second.etag)
        assert await objects.head("agents/main/x") is None

    on_engine(check)


def test_only_one_of_many_concurrent_creators_succeeds(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        tries = [objects.put("agents/main/lock", b"%d" % number, if_absent=True) for number in range(12)]
        ended = await asyncio.gather(*tries, return_exceptions=True)
        winners = [number for number, end in enumerate(ended) if not isinstance(end, BaseException)]
        assert len(winners) == 1
        assert all(isinstance(end, Conflict) for number, end in enumerate(ended) if number not in winners)
        assert (await objects.get("agents/main/lock"))[1] == b"%d" % winners[0]

    on_engine(check)


def test_no_change_is_lost_when_all_ask_for_a_match(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("agents/main/count", b"0")

        async def add() -> None:
            while True:
                info, data = await objects.get("agents/main/count")
                try:
                    await objects.put("agents/main/count", b"%d" % (int(data) + 1), if_match=info.etag)
                    return
                except Conflict:
                    await asyncio.sleep(0)

        await asyncio.gather(*(add() for _ in range(10)))
        assert (await objects.get("agents/main/count"))[1] == b"10"

    on_engine(check)


# -- listings -------------------------------------------------------------------------------------------------------


def test_a_listing_is_in_the_order_of_the_bytes(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        names = [f"agents/main/{name}" for name in ("a-b", "a.txt", "a/b.c/d", "a/b/e", "a0", "é", "日")]
        await fill(objects, *reversed(names))
        assert [info.key for info in (await objects.list("agents/main/")).objects] == names

    on_engine(check)


def test_a_listing_stays_within_its_prefix(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await fill(objects, "agents/a/x", "agents/ab/x", "agents/a/y/z", "skills/s/SKILL.md")
        assert await keys(objects, "agents/a/") == ["agents/a/x", "agents/a/y/z"]
        assert await keys(objects, "agents/", delimiter=True) == ["agents/a/", "agents/ab/"]
        assert await keys(objects, "skills/", delimiter=True) == ["skills/s/"]
        assert await keys(objects, "agents/") == ["agents/a/x", "agents/a/y/z", "agents/ab/x"]

    on_engine(check)


@pytest.mark.parametrize("delimiter", [False, True])
def test_long_listings_come_in_pages(on_engine: Callable[[Check], None], delimiter: bool) -> None:
    async def check(objects: Objects) -> None:
        names = [f"agents/main/{number:02}" + ("/deep" if number % 3 else "") for number in range(25)]
        await asyncio.gather(*(objects.put(name, b"x") for name in names))
        expected = [name[:14] + "/" if delimiter and "/deep" in name else name for name in names]
        assert await keys(objects, "agents/main/", delimiter=delimiter, limit=7) == expected
        page = await objects.list("agents/main/", delimiter=delimiter, limit=7)
        assert len(page.objects) + len(page.prefixes) == 7 and page.after is not None
        assert await keys(objects, "agents/main/", delimiter=delimiter, limit=25) == expected

    on_engine(check)


def test_more_than_a_thousand(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        names = [f"agents/main/{number:04}" for number in range(1001)]
        for start in range(0, len(names), 50):
            await asyncio.gather(*(objects.put(name, b"") for name in names[start : start + 50]))
        assert await keys(objects, "agents/main/") == names
        assert await keys(objects, "agents/main/", delimiter=True) == names

    on_engine(check)


def test_folders_that_other_programs_made_are_not_objects(bucket: tuple[str, str]) -> None:
    url, endpoint = bucket
    prefix = uuid.uuid4().hex

    async def main() -> None:
        objects = S3Objects(f"{url}/{prefix}", endpoint=endpoint, access_key_id="any", secret_access_key="any")
        await fill(objects, "agents/main/a/x", "agents/main/empty")
        await objects.put("agents/main/empty", b"")
        for marker in ("agents/main/a/", "agents/main/a/b/", "agents/main/c/"):
            made = urllib.request.Request(f"{endpoint}/{url[5:]}/{prefix}/{marker}", b"", method="PUT")
            await asyncio.to_thread(lambda request: urllib.request.urlopen(request, timeout=30).close(), made)
        assert await keys(objects, "agents/main/") == ["agents/main/a/x", "agents/main/empty"]
        assert await keys(objects, "agents/main/a/") == ["agents/main/a/x"]
        assert await keys(objects, "agents/main/a/", delimiter=True) == ["agents/main/a/b/", "agents/main/a/x"]

    asyncio.run(main())


# -- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_is_seen_when_it_is_committed(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("agents/main/big.bin", b"old")
        writer = await objects.open_write("agents/main/big.bin", "application/x-thing")
        piece = bytes(range(256)) * 4096
        for _ in range(12):
            await writer.write(piece)
        assert (await objects.get("agents/main/big.bin"))[1] == b"old"
        assert await keys(objects, "agents/main/") == ["agents/main/big.bin"]
        info = await writer.commit()
        await writer.abort()
        assert (info.size, info.content_type) == (12 * len(piece), "application/x-thing")
        assert await objects.head("agents/main/big.bin") == info
        reader = await objects.open_read("agents/main/big.bin")
        got = b"".join([part async for part in parts_of(reader)])
        assert reader.info == info
        assert got == piece * 12

    on_engine(check)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_many_that_are_held_take_no_memory(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        piece = bytes(range(256)) * 4096
        before = resident_bytes()
        writers = [await objects.open_write(f"agents/main/many/{number}", held=True) for number in range(64)]
        for writer in writers:
            for _ in range(6):
                await writer.write(bytearray(piece))
        assert resident_bytes() - before < 128 * 1024 * 1024
        assert await keys(objects, "agents/main/many/") == []
        for number, writer in enumerate(writers):
            await (writer.commit() if number < 2 else writer.abort())
            await writer.abort()
        assert await keys(objects, "agents/main/many/") == ["agents/main/many/0", "agents/main/many/1"]
        assert (await objects.get("agents/main/many/1"))[1] == piece * 6

    on_engine(check)


def test_one_that_is_held_and_finds_no_room_is_nothing(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        writers = [await objects.open_write(f"agents/main/full/{number}", held=True) for number in range(2)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, before[1]))
        try:
            for writer in writers:
                with pytest.raises(Failed, match=r"agents/main/full|Failed to write"):
                    for _ in range(600):
                        await writer.write(bytes(1000))
                await writer.abort()
                await writer.abort()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert await keys(objects, "agents/main/") == []

    on_engine(check)


def test_an_aborted_stream_never_was(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        writer = await objects.open_write("agents/main/deep/x")
        await writer.write(b"x" * 6 * 1024 * 1024)
        await writer.abort()
        await writer.abort()
        assert await objects.head("agents/main/deep/x") is None
        assert await keys(objects, "agents/main/") == []

    on_engine(check)


def test_an_empty_stream(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        writer = await objects.open_write("agents/main/x")
        assert (await writer.commit()).size == 0
        assert (await objects.get("agents/main/x"))[1] == b""

    on_engine(check)


def test_reading_from_an_offset(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        data = bytes(range(256)) * 8192
        await objects.put("agents/main/x", data)
        for offset in (0, 1, 1_500_000, len(data)):
            reader = await objects.open_read("agents/main/x", offset)
            assert b"".join([part async for part in parts_of(reader)]) == data[offset:]
            assert reader.info.size == len(data)

    on_engine(check)


def test_a_reader_sees_one_content(on_engine: Callable[[Check], None]) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("agents/main/x", b"a" * 3_000_000)
        reader = await objects.open_read("agents/main/x")
        first = await reader.read()
        await objects.put("agents/main/x", b"b" * 3_000_000)
        rest = b"".join([part async for part in parts_of(reader)])
        assert set(first + rest) == {ord("a")} and len(first + rest) == 3_000_000

    on_engine(check)


async def parts_of(reader: Any) -> AsyncIterator[bytes]:
    try:
        while part := await reader.read():
            yield part
    finally:
        await reader.close()


# -- keys that are none ---------------------------------------------------------------------------------------------

BAD_KEYS = [
    "",
    "/",
    "token",
    "farhand.db",
    "agents",
    "agents/main",
    "agents/main/",
    "agents//x",
    "/agents/main/x",
    "agents/../token",
    "agents/main/../../token",
    "agents/main/./x",
    "agents/main/x/",
    "skills",
    "skills/",
    "skills/../token",
    "skills/a\0b",
    "skills/a\nb",
    "skills/a\u2028b",
    "skills/\ud800",
    "skills/" + "x" * 256,
    "skills/" + "ä" * 128,
    "skills/" + "x/" * 600 + "x",
    "skills/.farhand-0123.tmp",
    "object-types/x",
    "nodes/x/ledger",
    "Agents/main/x",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_an_invalid_key_reaches_nothing(on_engine: Callable[[Check], None], key: str) -> None:
    with pytest.raises(InvalidArgs):
        check_key(key)

    async def check(objects: Objects) -> None:
        for attempt in (objects.head, objects.get, objects.delete, objects.open_read, objects.open_write):
            with pytest.raises(InvalidArgs):
                await attempt(key)  # type: ignore[operator]
        for content_type in (None, "text/plain"):
            with pytest.raises(InvalidArgs):
                await objects.put(key, b"x", content_type=content_type)
        assert await keys(objects, "agents/") == await keys(objects, "skills/") == []

    on_engine(check)


@pytest.mark.parametrize(
    "prefix", ["", "a", "agents", "nodes/", "agents/../", "agents/main/../../", "/agents/", "agents//"]
)
def test_an_invalid_prefix_lists_nothing(on_engine: Callable[[Check], None], prefix: str) -> None:
    async def check(objects: Objects) -> None:
        with pytest.raises(InvalidArgs):
            await objects.list(prefix)

    on_engine(check)
