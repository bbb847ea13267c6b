"""The memory without a gateway: files in, passages out."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from farhand.memory.embedders import Embedder, HttpEmbedder, UnavailableEmbedder
from farhand.memory.memory import MIN_SCORE, EmbeddingTimeouts, Memory, SearchResult, scaled
from farhand.memory.sources import FolderSource
from farhand.protocol.errors import InvalidArgs, NotAllowed, NotFound, ToolError
from tests.support.embedding_server import EmbeddingServer

NOTES = "# Home\n\nThe wifi password is hunter2.\n\n# Work\n\nDeploy with make ship.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "agents" / "main"
    (place / "memory").mkdir(parents=True)
    (place / "MEMORY.md").write_text(NOTES)
    (place / "memory" / "2026-11-15.md").write_text("Mimi the cat had a birthday.\n")
    return place


def remember(
    folder: Path,
    work: Callable[[Memory], Awaitable[Any]],
    embedder: Embedder | None = None,
    *more: FolderSource,
    waits: EmbeddingTimeouts | None = None,
) -> Any:
    """Run `work` with a memory over a folder."""

    async def run() -> Any:
        sources = (FolderSource(folder), *more)
        memory = Memory(folder.parent.parent / "memory.db", lambda _: sources, embedder, waits=waits)
        try:
            return await work(memory)
        finally:
            await memory.close()

    return asyncio.run(run())


def places(found: SearchResult) -> list[tuple[str, int, int]]:
    return [(hit.path, hit.start_line, hit.end_line) for hit in found.hits]


def search(folder: Path, query: str, **options: Any) -> SearchResult:
    found: SearchResult = remember(folder, lambda memory: memory.search(query, agent="main", **options))
    return found


# -- keyword ----------------------------------------------------------------------------------------------


def test_a_passage_is_found_with_its_lines(folder: Path) -> None:
    found = search(folder, "wifi password?")
    assert places(found) == [("MEMORY.md", 1, 3)]
    assert found.hits[0].text == "# Home\n\nThe wifi password is hunter2."
    assert found.index == "keyword"
    assert found.note is None


def test_limits_hold(folder: Path) -> None:
    (folder / "memory" / "many.md").write_text("\n\n".join(f"# {n}\nneedle number {n}" for n in range(70)))
    assert len(search(folder, "needle").hits) == 6
    assert len(search(folder, "needle", max_results=0).hits) == 6
    assert len(search(folder, "needle", max_results=-3).hits) == 6
    assert len(search(folder, "needle", max_results=9).hits) == 9
    assert len(search(folder, "needle", max_results=100_000).hits) == 50
    strict = search(folder, "needle zebra", min_score=0.9)
    assert strict.hits == []
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidArgs, match="min_score"):
            search(folder, "needle", min_score=wrong)


def test_a_blank_query_is_refused(folder: Path) -> None:
    for query in ("", " \n"):
        with pytest.raises(InvalidArgs, match="query is required"):
            search(folder, query)


def test_files_that_change_appear_and_vanish_are_noticed(folder: Path) -> None:
    async def work(memory: Memory) -> None:
        async def hits(query: str) -> list[tuple[str, int, int]]:
            return places(await memory.search(query, agent="main"))

        assert await hits("wifi") == [("MEMORY.md", 1, 3)]
        (folder / "MEMORY.md").write_text("\n\n" + NOTES)
        assert await hits("wifi") == [("MEMORY.md", 3, 5)]
        (folder / "memory" / "new.md").write_text("zebra\n")
        assert await hits("zebra") == [("memory/new.md", 1, 1)]
        # The same size within the same tick of the clock.
        (folder / "memory" / "new.md").write_text("camel\n")
        assert await hits("camel") == [("memory/new.md", 1, 1)]
        assert await hits("zebra") == []
        (folder / "memory" / "new.md").unlink()
        (folder / "MEMORY.md").unlink()
        assert await hits("camel wifi") == []
        assert (await memory.status("main"))["files"] == 1

    remember(folder, work)


def test_a_change_that_keeps_time_and_size_is_noticed(folder: Path) -> None:
    async def work(memory: Memory) -> None:
        path = folder / "memory" / "2026-11-15.md"
        await memory.search("cat", agent="main")
        before = path.stat()
        path.write_text(path.read_text().replace("cat", "dog"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert places(await memory.search("dog", agent="main")) == [("memory/2026-11-15.md", 1, 1)]

    remember(folder, work)


def test_a_folder_that_comes_later_or_is_replaced_is_noticed(folder: Path, tmp_path: Path) -> None:
    async def work(memory: Memory) -> None:
        async def hits(query: str) -> list[tuple[str, int, int]]:
            return places(await memory.search(query, agent="main"))

        (folder / "memory").rename(tmp_path / "away")
        assert await hits("birthday") == []
        (folder / "memory").mkdir()
        assert await hits("birthday") == []
        (folder / "memory" / "later.md").write_text("The birthday is in May.\n")
        assert await hits("birthday") == [("memory/later.md", 1, 1)]
        (folder / "memory").rename(tmp_path / "later")
        (tmp_path / "away").rename(folder / "memory")
        assert await hits("birthday") == [("memory/2026-11-15.md", 1, 1)]
        folder.rename(tmp_path / "old")
        assert await hits("birthday wifi") == []
        (tmp_path / "old").rename(folder)
        assert await hits("wifi") == [("MEMORY.md", 1, 3)]

    remember(folder, work)


def test_a_link_is_looked_at_each_time(folder: Path) -> None:
    async def work(memory: Memory) -> None:
        (folder / "memory" / "same.md").symlink_to("../MEMORY.md")
        assert len((await memory.search("wifi", agent="main")).hits) == 2
        (folder / "MEMORY.md").write_text("zebra\n")
        assert len((await memory.search("zebra", agent="main")).hits) == 2

    remember(folder, work)


def test_changes_that_the_kernel_does_not_report_are_found_by_a_full_check(folder: Path, tmp_path: Path) -> None:
    """Another name of the same file, in a folder that is not watched."""
    other = tmp_path / "other name"
    other.hardlink_to(folder / "MEMORY.md")

    async def run() -> None:
        sources = [FolderSource(folder, look_seconds=0)]
        memory = Memory(tmp_path / "memory.db", lambda _: sources)
        try:
            await memory.search("wifi", agent="main")
            other.write_text("zebra\n")
            assert places(await memory.search("zebra", agent="main")) == [("MEMORY.md", 1, 1)]
        finally:
            await memory.close()

    asyncio.run(run())


def test_many_notes_with_the_same_words_hide_none_that_has_them_all(folder: Path) -> None:
    """More places of each word than are ranked: what holds them together is asked for."""
    for number in range(30):
        kinds = ("apple", "pear", "plum", "nut", "fig", "date")
        notes = [f"## {kind} {number}.{place}\n{kind}\n" for place in range(30) for kind in kinds]
        (folder / "memory" / f"{number}.md").write_text("\n".join(notes))
    (folder / "memory" / "fruit.md").write_text("An apple, a pear and a plum.\n")
    assert search(folder, "apple pear plum").hits[0].path == "memory/fruit.md"
    assert search(folder, "apple birthday plum").hits[0].path == "memory/2026-11-15.md"
    assert len(search(folder, "pear", max_results=50).hits) == 50


def test_a_small_memory_beside_a_large_one_is_searched_all_the_same(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "MEMORY.md").write_text("An apple a day.\n")
    for number in range(15):
        notes = [f"## {number}.{place}\nan apple and a pear\n" for place in range(80)]
        (folder / "memory" / f"{number}.md").write_text("\n".join(notes))

    async def run() -> None:
        places_of = {"small": [FolderSource(tmp_path / "small")], "main": [FolderSource(folder)]}
        memory = Memory(tmp_path / "memory.db", places_of.__getitem__)
        try:
            await memory.search("apple", agent="small")
            await memory.search("apple", agent="main")
            assert places(await memory.search("pear apple", agent="small")) == [("MEMORY.md", 1, 1)]
        finally:
            await memory.close()

    asyncio.run(run())


def test_only_memory_files_are_indexed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.md").write_text("secret needle\n")
    (folder / "SOUL.md").write_text("needle\n")
    inner = folder / "memory"
    (inner / "deep").mkdir()
    (inner / "deep" / "x.md").write_text("needle\n")
    (inner / "x.txt").write_text("needle\n")
    (inner / ".hidden.md").write_text("needle\n")
    (inner / "link.md").symlink_to(tmp_path / "outside.md")
    (inner / "soul.md").symlink_to(folder / "SOUL.md")
    (inner / "dangling.md").symlink_to("nowhere.md")
    os.mkfifo(inner / "pipe.md")
    (inner / "folder.md").mkdir()
    assert search(folder, "needle").hits == []
    (inner / "same.md").symlink_to("2026-11-15.md")
    assert places(search(folder, "birthday"))[0][0] in ("memory/2026-11-15.md", "memory/same.md")


def test_a_memory_folder_that_leads_outside_is_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "memory").rename(tmp_path / "elsewhere")
    (folder / "memory").symlink_to(tmp_path / "elsewhere")
    assert search(folder, "birthday").hits == []


def test_bytes_that_are_not_text_do_no_harm(folder: Path) -> None:
    (folder / "memory" / "odd.md").write_bytes(b"\xff\xfe needle \0 after\n\xc3\n")
    (folder / "memory" / "bom.md").write_bytes(b"\xef\xbb\xbf# Heading\nhaystack\n")
    (folder / "memory" / "empty.md").write_bytes(b"")
    assert places(search(folder, "needle")) == [("memory/odd.md", 1, 2)]
    assert search(folder, "haystack").hits[0].text == "# Heading\nhaystack"


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert search(tmp_path / "a" / "b", "anything").hits == []


def test_the_same_file_in_two_places_is_shown_once(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "MEMORY.md").write_text(NOTES + "\n# More\n\nThe zebra is striped.\n")

    async def work(memory: Memory) -> None:
        assert places(await memory.search("wifi", agent="main")) == [("MEMORY.md", 1, 3)]
        assert places(await memory.search("zebra", agent="main")) == [("agents/main/MEMORY.md", 9, 11)]
        assert (await memory.get("agents/main/MEMORY.md", agent="main", start=11)).text == "The zebra is striped."
        assert (await memory.get("MEMORY.md", agent="main")).total_lines == 7

    remember(folder, work, None, FolderSource(copy, "agents/main/"))


@pytest.mark.parametrize("damage", ["noise", "truncated", "empty", "old", "page", "gone"])
def test_a_damaged_index_is_rebuilt(folder: Path, damage: str) -> None:
    assert search(folder, "wifi").hits
    path = folder.parent.parent / "memory.db"
    data = path.read_bytes()
    for beside in path.parent.glob("memory.db-*"):
        beside.unlink()
    if damage == "noise":
        path.write_bytes(os.urandom(len(data)))
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "old":
        path.write_bytes(data[:60] + b"\0\0\0\x7f" + data[64:])
    elif damage == "page":
        path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
    else:
        path.unlink()
    assert places(search(folder, "wifi")) == [("MEMORY.md", 1, 3)]


def test_an_index_damaged_while_in_use_is_rebuilt(folder: Path) -> None:
    async def work(memory: Memory) -> None:
        assert (await memory.search("wifi", agent="main")).hits
        await memory.reindex("main")
        path = folder.parent.parent / "memory.db"
        (path.parent / "memory.db-wal").write_bytes(b"")
        path.write_bytes(os.urandom(path.stat().st_size + 8192))
        (folder / "MEMORY.md").write_text(NOTES + "\nzebra\n")
        assert (await memory.search("zebra", agent="main")).hits

    remember(folder, work)


# -- reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("MEMORY.md", {}, (1, 7, NOTES.rstrip("\n"))),
        ("./MEMORY.md", {"start": 3, "lines": 1}, (3, 3, "The wifi password is hunter2.")),
        ("MEMORY.md", {"start": 7, "lines": 99}, (7, 7, "Deploy with make ship.")),
        ("MEMORY.md:3-4", {}, (3, 4, "The wifi password is hunter2.\n")),
        ("MEMORY.md:7", {}, (7, 7, "Deploy with make ship.")),
        ("MEMORY.md:3-4", {"start": 7}, (7, 7, "Deploy with make ship.")),
        ("memory//2026-11-15.md", {"start": 0, "lines": 0}, (1, 1, "Mimi the cat had a birthday.")),
    ],
)
def test_lines_are_counted_from_one(
    folder: Path, path: str, options: Mapping[str, int], expected: tuple[int, int, str]
) -> None:
    passage = remember(folder, lambda memory: memory.get(path, agent="main", **options))
    assert (passage.start_line, passage.end_line, passage.text) == expected


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("SOUL.md", NotAllowed),
        ("../token", NotAllowed),
        ("memory/../../token", NotAllowed),
        ("memory/../MEMORY.md", NotAllowed),
        ("/etc/passwd", NotAllowed),
        ("memory/x.txt", NotAllowed),
        ("memory/deep/x.md", NotAllowed),
        ("memory/.hidden.md", NotAllowed),
        ("memory", NotAllowed),
        ("", NotAllowed),
        ("memory/link.md", NotAllowed),
        ("memory/nothing.md", NotFound),
        ("MEMORY.md\0", InvalidArgs),
        ("memory/\ud800.md", InvalidArgs),
        ("memory/" + "x" * 300 + ".md", InvalidArgs),
    ],
)
def test_nothing_but_memory_files_is_read(folder: Path, tmp_path: Path, path: str, error: type[ToolError]) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (folder / "SOUL.md").write_text("soul\n")
    (folder / "memory" / "link.md").symlink_to(tmp_path / "secret")
    with pytest.raises(error):
        remember(folder, lambda memory: memory.get(path, agent="main"))


def test_lines_that_are_not_there_are_refused(folder: Path) -> None:
    for options in ({"start": 8}, {"start": -1}, {"lines": -1}):
        with pytest.raises(InvalidArgs):
            remember(folder, lambda memory, options=options: memory.get("MEMORY.md", agent="main", **options))
    (folder / "MEMORY.md").write_text("")
    assert remember(folder, lambda memory: memory.get("MEMORY.md", agent="main")).text == ""


# -- vectors ----------------------------------------------------------------------------------------------


def test_meaning_is_found_without_a_shared_word(folder: Path) -> None:
    with EmbeddingServer() as server:
        embedder = HttpEmbedder(server.url, "test-model", "key")
        found = remember(folder, lambda m: m.search("how do I log on to the wireless?", agent="main"), embedder)
        assert server.paths[0] == "/v1/embeddings"
        assert server.keys[0] == "Bearer key"
    assert places(found)[0] == ("MEMORY.md", 1, 3)
    assert found.index == "hybrid"
    assert found.note is None
    assert 0.35 <= found.hits[0].score <= 1


def test_an_exact_name_is_found_whatever_its_vector_says(folder: Path) -> None:
    (folder / "memory" / "errors.md").write_text("0x80070005 means: wifi wifi wifi wifi\n")
    with EmbeddingServer() as server:
        embedder = HttpEmbedder(server.url, "test-model")
        found = remember(folder, lambda memory: memory.search("0x80070005", agent="main"), embedder)
    assert places(found)[0] == ("memory/errors.md", 1, 1)


def test_no_text_is_embedded_twice(folder: Path) -> None:
    with EmbeddingServer() as server:

        def ask(query: str) -> SearchResult:
            embedder = HttpEmbedder(server.url, "test-model")
            found: SearchResult = remember(folder, lambda memory: memory.search(query, agent="main"), embedder)
            return found

        ask("wifi")
        assert sorted(server.texts[:-1]) == sorted(
            [
                "# Home\n\nThe wifi password is hunter2.",
                "# Work\n\nDeploy with make ship.",
                "Mimi the cat had a birthday.",
            ]
        )
        server.texts.clear()
        (folder / "MEMORY.md").rename(folder / "memory" / "moved.md")
        (folder / "memory" / "new.md").write_text("The kitten is grey.\n")
        assert places(ask("pet"))[0][0] == "memory/new.md"
        assert server.texts == ["The kitten is grey.", "pet"]


def test_another_model_gets_vectors_of_its_own(folder: Path) -> None:
    with EmbeddingServer() as server:
        for model in ("one", "two"):
            server.texts.clear()
            embedder = HttpEmbedder(server.url, model)
            assert remember(folder, lambda memory: memory.search("pet", agent="main"), embedder).index == "hybrid"
            assert len(server.texts) == 4


def test_vectors_of_another_length_are_computed_again(folder: Path) -> None:
    with EmbeddingServer() as server:

        async def work(memory: Memory) -> None:
            assert (await memory.search("wifi", agent="main")).index == "hybrid"
            server.answer = lambda body: (200, {"data": [{"embedding": [1.0, 2.0, 3.0]} for _ in body["input"]]})
            found = await memory.search("wifi", agent="main")
            assert found.index == "keyword"
            assert found.hits
            assert found.note and "another length" in found.note
            assert (await memory.search("wifi", agent="main")).index == "hybrid"

        remember(folder, work, HttpEmbedder(server.url, "test-model"))


def test_new_text_with_vectors_of_another_length_replaces_the_old(folder: Path) -> None:
    (folder / "memory" / "many.md").write_text("".join(f"# {number}\nnote {number}\n" for number in range(300)))
    with EmbeddingServer() as server:

        async def work(memory: Memory) -> None:
            await memory.search("wifi", agent="main")
            server.answer = lambda body: (200, {"data": [{"embedding": [1.0, 2.0, 3.0]} for _ in body["input"]]})
            (folder / "memory" / "new.md").write_text("The zebra is striped.\n")
            found = await memory.search("zebra", agent="main")
            assert (found.index, found.note) == ("hybrid", None)
            assert places(found)[0] == ("memory/new.md", 1, 1)
            state = await memory.status("main")
            assert state["embedded"] == state["chunks"] == 304

        remember(folder, work, HttpEmbedder(server.url, "test-model"))


def test_many_passages_are_compared_by_their_signs_first(folder: Path) -> None:
    """More than are compared in full, with vectors that all lean to one side."""
    kinds = ("wifi", "deploy", "cat", "birthday")
    notes = [f"# {number}\nthe {kinds[number % 4]} note number {number}\n" for number in range(1500)]
    (folder / "MEMORY.md").write_text("".join(notes) + "# Only\nthe kitten was born\n")
    with EmbeddingServer() as server:
        embedder = HttpEmbedder(server.url, "test-model")
        found = remember(folder, lambda memory: memory.search("pet birthday", agent="main"), embedder)
    assert found.hits[0].text == "# Only\nthe kitten was born"


@pytest.mark.parametrize(
    ("status", "reply", "words"),
    [
        (500, {"error": "boom"}, "embedding status 500"),
        (401, b"no such key", "embedding status 401: no such key"),
        (302, b"", "embedding status 302"),
        (200, b"not json", "an invalid response"),
        (200, {"data": []}, "0 vectors for"),
        (200, {"data": [{"embedding": []}] * 3}, "an invalid vector"),
        (200, {"data": [{"embedding": [0.0, 0.0]}] * 3}, "an invalid vector"),
        (200, {"data": [{"embedding": [1e308, 1e308]}] * 3}, "an invalid vector"),
        (200, {"data": [{"embedding": [1.0] * (n + 1)} for n in range(3)]}, "different lengths"),
        (200, b'{"data": [{"embedding": [NaN]}]}', "an invalid response"),
        (200, {"data": [{"embedding": "text"}] * 3}, "an invalid response"),
    ],
)
def test_a_failing_back_end_is_reported_and_keywords_answer(folder: Path, status: int, reply: Any, words: str) -> None:
    with EmbeddingServer() as server:
        server.answer = lambda _: (status, reply)
        embedder = HttpEmbedder(server.url, "test-model")
        found = remember(folder, lambda memory: memory.search("wifi", agent="main"), embedder)
    assert places(found) == [("MEMORY.md", 1, 3)]
    assert found.index == "keyword"
    assert found.note is not None
    assert words in found.note


def test_a_back_end_that_failed_is_left_alone_for_a_while(folder: Path) -> None:
    with EmbeddingServer() as server:
        server.answer = lambda _: (503, b"busy")

        async def work(memory: Memory) -> None:
            for _ in range(3):
                found = await memory.search("wifi", agent="main")
                assert found.hits
                assert found.note and "embedding status 503: busy" in found.note

        remember(folder, work, HttpEmbedder(server.url, "test-model"))
        assert len(server.paths) == 1
        server.answer = server.embeddings

        async def recovered(memory: Memory) -> None:
            server.answer = lambda _: (503, b"busy")
            assert (await memory.search("wifi", agent="main")).index == "keyword"
            server.answer = server.embeddings
            assert (await memory.search("wifi", agent="main")).index == "hybrid"

        remember(folder, recovered, HttpEmbedder(server.url, "test-model"), waits=EmbeddingTimeouts(rest=0))


def test_an_unavailable_back_end_is_reported(folder: Path) -> None:
    with EmbeddingServer() as server:
        url = server.url
    found = remember(folder, lambda memory: memory.search("wifi", agent="main"), HttpEmbedder(url, "test-model"))
    assert found.hits
    assert found.note and "cannot be reached" in found.note


def test_a_silent_back_end_does_not_block_others_for_long(folder: Path) -> None:
    with EmbeddingServer() as server:
        server.hold.clear()

        async def work(memory: Memory) -> None:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.001)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            found = await memory.search("wifi", agent="main")
            ticking.cancel()
            assert found.index == "keyword"
            assert found.note and "did not answer within" in found.note
            assert ticks > 3  # the loop went on meanwhile

        remember(
            folder, work, HttpEmbedder(server.url, "test-model"), waits=EmbeddingTimeouts(query=0.05, patience=0.05)
        )


def test_what_is_not_embedded_yet_is_found_by_keyword(folder: Path) -> None:
    release = threading.Event()
    with EmbeddingServer() as server:

        def slow_for_many(body: Any) -> tuple[int, Any]:
            if len(body["input"]) > 1:
                release.wait(30)
            return server.embeddings(body)

        server.answer = slow_for_many

        async def work(memory: Memory) -> None:
            found = await memory.search("birthday", agent="main")
            assert places(found) == [("memory/2026-11-15.md", 1, 1)]
            assert found.note and "3 passages are not embedded yet" in found.note
            release.set()
            await memory.reindex("main")
            found = await memory.search("when was the kitten born", agent="main")
            assert found.note is None
            assert places(found) == [("memory/2026-11-15.md", 1, 1)]

        remember(folder, work, HttpEmbedder(server.url, "test-model"), waits=EmbeddingTimeouts(patience=0.05))


def test_an_embedder_that_cannot_work_says_so(folder: Path) -> None:
    found = remember(
        folder, lambda m: m.search("wifi", agent="main"), UnavailableEmbedder("local", "it is not installed")
    )
    assert found.hits
    assert found.note == "searched by keyword alone: it is not installed"


@pytest.mark.parametrize("related", [0.05, 0.25, 0.35])
def test_scores_of_every_index_are_on_one_scale(related: float) -> None:
    assert scaled(0.0, related) == 0 and scaled(1.0, related) == pytest.approx(1)
    assert scaled(related, related) == pytest.approx(MIN_SCORE) == pytest.approx(0.35)
    scores = [scaled(number / 100, related) for number in range(101)]
    assert scores == sorted(scores)


def test_by_keyword_the_default_threshold_is_that_of_the_seed(folder: Path) -> None:
    (folder / "MEMORY.md").write_text("# Notes\n\nThe needle lies in the haystack behind the barn.\n")
    for query in ("needle", "where is the needle", "needle zebra"):
        found = search(folder, query)
        assert found.hits and all(hit.score >= 0.35 for hit in found.hits), query
        assert search(folder, query, min_score=0.35) == found
