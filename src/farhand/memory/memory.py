"""The memory of the agents: keeps the index up to date with the files, and searches it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from farhand.memory.chunks import lines_of
from farhand.memory.embedders import Embedder, EmbeddingError
from farhand.memory.index import CANDIDATES, FileText, Index, IndexDamaged, IndexedChunk
from farhand.memory.sources import LARGEST_FILE, FolderSource, Source, checked_path
from farhand.memory.vectors import Vector
from farhand.memory.words import MOST_QUERY
from farhand.protocol.errors import InvalidArgs, NotAllowed, NotFound, ToolError
from farhand.protocol.redaction import KnownSecrets

log = logging.getLogger(__name__)

DEFAULT_RESULTS: Final = 6
MOST_RESULTS: Final = 50
# Minimum score of a hit if neither the search nor the settings give one. Scores are scaled to it, see `scaled`.
MIN_SCORE: Final = 0.35
# The raw keyword score from which a passage is considered related: any shared word except the most common ones.
# Without vectors, one result too many is better than one too few.
KEYWORD_THRESHOLD: Final = 0.05
KEYWORD_BONUS: Final = 0.1
# Minimum score of a chunk with every word of the query, whatever its vector.
KEYWORD_FLOOR: Final = 0.5
BATCH_FILES: Final = 200
BATCH_BYTES: Final = 8 * 1024 * 1024
BATCH_TEXTS: Final = 2048
MOST_PLACES: Final = 32
MOST_PASSAGE: Final = 50 * 1024

_CITED = re.compile(r"(.+\.md):(\d{1,9})(?:-(\d{1,9}))?")

T = TypeVar("T")
# The sources of an agent's memory, the most important first.
Sources = Callable[[str], Sequence[Source]]


class EmbeddingTimeouts(msgspec.Struct, frozen=True):
    """Timeouts for an embedder, in seconds."""

    query: float = 10.0
    # For one batch of passages.
    fill: float = 60.0
    # How long a search waits for new text to be embedded before it uses what is there.
    patience: float = 3.0
    # How long an embedder is not used after a failure.
    rest: float = 15.0


class Hit(msgspec.Struct, frozen=True):
    """A passage that was found; lines are counted from 1."""

    path: str
    start_line: int
    end_line: int
    score: float
    text: str


class SearchResult(msgspec.Struct, frozen=True):
    """The hits of a search, best first, and the kind of index that was used."""

    hits: list[Hit]
    index: Literal["keyword", "hybrid"]
    # Why vectors were not used, or that some are still missing.
    note: str | None = None


class Passage(msgspec.Struct, frozen=True):
    """Lines of a memory file."""

    path: str
    start_line: int
    end_line: int
    text: str
    total_lines: int


class Memory:
    """One index for all agents. The owner calls `close`."""

    def __init__(
        self,
        path: Path,
        sources: Sources,
        embedder: Embedder | None = None,
        *,
        min_score: float | None = None,
        waits: EmbeddingTimeouts | None = None,
        secrets: KnownSecrets | None = None,
    ) -> None:
        """`min_score`: default minimum score of a hit. `secrets` are redacted before a text is indexed or embedded."""
        self._secrets = secrets or KnownSecrets()
        self._index = Index(path)
        self._sources = sources
        self._embedder = embedder
        self._min_score = min_score
        self._waits = waits or EmbeddingTimeouts()
        self._syncing = asyncio.Lock()
        self._places: dict[str, Sequence[Source]] = {}
        self._stamps: dict[str, Mapping[str, str]] = {}
        self._complete: dict[tuple[str, ...], int] = {}
        self._filling: asyncio.Task[None] | None = None
        self._trouble: EmbeddingError | None = None
        self._rest_until = 0.0
        self._index.forget_unused_vectors(embedder.name if embedder else None)

    async def close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        if self._embedder is not None:
            await self._embedder.close()
        for places in self._places.values():
            for source in places:
                source.close()
        await asyncio.to_thread(self._index.close)

    # -- asking -----------------------------------------------------------------------------------------

    async def search(
        self, query: str, *, agent: str, max_results: int | None = None, min_score: float | None = None
    ) -> SearchResult:
        """Search the memory of an agent. Raises InvalidArgs for a blank query or invalid limits."""
        if not query.strip():
            raise InvalidArgs("query is required")
        if min_score is not None and not 0 <= min_score <= 1:
            raise InvalidArgs(f"parameter 'min_score': must be between 0 and 1, not {min_score:g}")
        limit = min(max_results, MOST_RESULTS) if max_results is not None and max_results > 0 else DEFAULT_RESULTS
        query = query[:MOST_QUERY].encode("utf-8", "replace").decode()
        return await self._steady(lambda: self._search(query, agent, limit, min_score))

    async def get(self, path: str, *, agent: str, start: int | None = None, lines: int | None = None) -> Passage:
        """Return a memory file, or `lines` lines of it from line `start` (counted from 1) on.

        A path may include lines, as hits show it: `MEMORY.md:3-7`. Raises NotAllowed for other files, NotFound, and
        InvalidArgs for lines that do not exist.
        """
        for name, value in (("from", start), ("lines", lines)):
            if value is not None and value < 0:
                raise InvalidArgs(f"parameter '{name}': must be at least 1, not {value}")
        cited = _CITED.fullmatch(path)
        if cited:
            path = cited[1]
            if not start:
                start = int(cited[2])
                lines = lines or max(1, int(cited[3] or cited[2]) - start + 1)
        shown, data = await self._read(path, agent)
        whole = lines_of(self._secrets.redact(data).decode("utf-8-sig", "replace"))
        first = start or 1
        if first > max(1, len(whole)):
            raise InvalidArgs(f"parameter 'from': {shown} has {len(whole)} lines, there is no line {first}")
        wanted = whole[first - 1 : first - 1 + lines] if lines else whole[first - 1 :]
        return Passage(shown, first, first + len(wanted) - 1, "\n".join(wanted), len(whole))

    async def status(self, agent: str) -> dict[str, Any]:
        """Return what is indexed, and how it can be searched."""
        return await self._steady(lambda: self._status(agent))

    async def reindex(self, agent: str) -> dict[str, Any]:
        """Read every file again and create all missing vectors; return the status."""
        self._rest_until = 0.0
        await self._steady(lambda: self._reindex(self._sources_of(agent)))
        return await self.status(agent)

    async def _steady(self, work: Callable[[], Awaitable[T]]) -> T:
        """Retry once if the index was damaged: it is rebuilt from the files."""
        try:
            return await work()
        except IndexDamaged:
            self._stamps.clear()
            return await work()

    async def _status(self, agent: str) -> dict[str, Any]:
        sources = self._sources_of(agent)
        note = await self._sync(sources)
        spaces = tuple(source.name for source in sources)
        places: list[dict[str, Any]] = []
        for source in sources:
            files, chunks = await asyncio.to_thread(self._index.totals, source.name)
            places.append({"source": source.name, "prefix": source.prefix, "files": files, "chunks": chunks})
        embedder = self._embedder
        missing = await asyncio.to_thread(self._index.missing_vectors, spaces, embedder.name) if embedder else 0
        chunks = sum(place["chunks"] for place in places)
        return {
            "agent": agent,
            "index": "hybrid" if embedder else "keyword",
            "sources": places,
            "files": sum(place["files"] for place in places),
            "chunks": chunks,
            "embedder": embedder.label if embedder else None,
            "embedded": chunks - missing if embedder else 0,
            "trouble": str(self._trouble) if self._trouble else note,
        }

    async def _reindex(self, sources: Sequence[Source]) -> None:
        async with self._syncing:
            for source in sources:
                self._stamps.pop(source.name, None)
                await asyncio.to_thread(self._index.forget_all, source.name)
        await self._sync(sources)
        if self._embedder is not None:
            with contextlib.suppress(EmbeddingError):
                await self._fill(self._embedder, tuple(source.name for source in sources), patience=None)

    # -- keeping in step --------------------------------------------------------------------------------

    def _sources_of(self, agent: str) -> Sequence[Source]:
        """Return the sources of an agent; those used last are kept, since they hold the state of their folders."""
        sources = self._places.pop(agent, None) or self._sources(agent)
        self._places[agent] = sources
        if len(self._places) > MOST_PLACES:
            for source in self._places.pop(next(iter(self._places))):
                source.close()
        return sources

    async def _sync(self, sources: Sequence[Source]) -> str | None:
        """Update the index from the files; return a note on sources that could not be read."""
        notes = []
        async with self._syncing:
            for source in sources:
                try:
                    await self._sync_source(source)
                except ToolError as error:
                    notes.append(f"{source.prefix or source.name}: {error.message}")
        return "; ".join(notes) or None

    async def _sync_source(self, source: Source) -> None:
        listing = await source.listing()
        known = self._stamps.get(source.name)
        if listing is known:
            return
        if known is None:
            known = await asyncio.to_thread(self._index.stamps, source.name)
        gone = [path for path in known if path not in listing]
        changed = [path for path, stamp in listing.items() if not stamp or known.get(path) != stamp]
        if not gone and not changed:
            self._stamps[source.name] = listing
            return
        self._stamps.pop(source.name, None)
        batch: list[FileText] = []
        size = 0
        for path in changed:
            try:
                data = await source.read(path)
            except ToolError as error:
                if path in known or not isinstance(error, NotFound):
                    log.warning("%s%s is not indexed: %s", source.prefix, path, error)
                gone.append(path)
                continue
            if len(data) > LARGEST_FILE:
                log.warning("%s%s is not indexed: larger than %d bytes", source.prefix, path, LARGEST_FILE)
                data = b""
            batch.append(FileText(path, listing[path], self._secrets.redact(data)))
            size += len(data)
            if len(batch) >= BATCH_FILES or size >= BATCH_BYTES:
                await asyncio.to_thread(self._index.update, source.name, batch, gone)
                batch, gone, size = [], [], 0
        if batch or gone:
            await asyncio.to_thread(self._index.update, source.name, batch, gone)
        self._stamps[source.name] = listing

    async def _read(self, path: str, agent: str) -> tuple[str, bytes]:
        sources = self._sources_of(agent)
        named = [source for source in sources if source.prefix and path.startswith(source.prefix)]
        missing: ToolError | None = None
        for source in named or sources:
            inner = path.removeprefix(source.prefix)
            if isinstance(source, FolderSource):
                inner = inner.removeprefix(f"{source.folder}/")
            plain = checked_path(inner)
            try:
                return source.prefix + plain, await source.read(plain)
            except NotFound as error:
                missing = error
        if missing is None:
            raise NotAllowed("this agent has no memory files")
        raise NotFound(f"there is no memory file {path[:200]!r}") from missing

    # -- searching --------------------------------------------------------------------------------------

    async def _search(self, query: str, agent: str, limit: int, min_score: float | None) -> SearchResult:
        sources = self._sources_of(agent)
        note = await self._sync(sources)
        spaces = tuple(source.name for source in sources)
        vector: Vector | None = None
        embedder = self._embedder
        if embedder is not None:
            try:
                vector, remark = await self._query_vector(embedder, query, spaces)
                scored = await asyncio.to_thread(self._rank, query, spaces, embedder.name, vector)
            except EmbeddingError as error:
                vector = None
                remark = f"searched by keyword alone: {error}"
            note = "; ".join(filter(None, (note, remark))) or None
        if embedder is None or vector is None:
            scored = await asyncio.to_thread(self._rank, query, spaces, "", None)
            related = KEYWORD_THRESHOLD
        else:
            related = embedder.threshold
        scored = [(scaled(score, related), entry) for score, entry in scored]
        least = MIN_SCORE if self._min_score is None else self._min_score
        if min_score is not None:
            least = min_score
        prefixes = {source.name: source.prefix for source in sources}
        order = {space: place for place, space in enumerate(spaces)}
        scored.sort(key=lambda pair: (-pair[0], order[pair[1].space], pair[1].path, pair[1].start_line, pair[1].id))
        hits: list[Hit] = []
        seen = set()
        for score, entry in scored:
            # The same file may be in two sources, such as a copy of the workspace.
            same = (entry.path, entry.start_line, entry.hash)
            if score < least or len(hits) >= limit:
                break
            if same not in seen:
                seen.add(same)
                path = prefixes[entry.space] + entry.path
                hits.append(Hit(path, entry.start_line, entry.end_line, round(min(1.0, score), 4), entry.text))
        return SearchResult(hits, "keyword" if vector is None else "hybrid", note)

    def _rank(
        self, query: str, spaces: tuple[str, ...], embedder: str, vector: Vector | None
    ) -> list[tuple[float, IndexedChunk]]:
        """Return chunks with their scores. Vectors dominate; shared words add a bonus, and a floor for exact names."""
        index = self._index
        ids = set(index.by_keyword(spaces, query))
        near: dict[int, float] = {}
        if vector is not None:
            signs = index.sign_index(spaces, embedder)
            wanted = signs.vectors(ids.union(signs.nearest(vector)))
            compared = index.vectors(wanted)
            fitting = [(number, data) for number, data in compared if len(data) == 4 * len(vector)]
            found = signs.similarities(vector, [data for _, data in fitting])
            for (number, _), cosine in zip(fitting, found, strict=True):
                near.update(dict.fromkeys(wanted[number], cosine))
            if compared and not near:
                index.forget_vectors(embedder)
                raise EmbeddingError(
                    "the model now returns vectors of another length; the old ones are being recomputed"
                )
            ids.update(heapq.nlargest(CANDIDATES, near, key=near.__getitem__))
        entries = index.entries(ids)
        shared = index.keyword_scores(entries, query)
        if vector is None:
            return [(shared.get(entry.id, 0.0), entry) for entry in entries]
        scored = []
        for entry in entries:
            words = shared.get(entry.id, 0.0)
            blended = near.get(entry.id, 0.0) + KEYWORD_BONUS * words
            scored.append((max(0.0, blended, KEYWORD_FLOOR * words), entry))
        return scored

    # -- embedding --------------------------------------------------------------------------------------

    async def _query_vector(self, embedder: Embedder, query: str, spaces: tuple[str, ...]) -> tuple[Vector, str | None]:
        """Return the query's vector, and a note if text is not embedded yet. Raises EmbeddingError."""
        if self._trouble is not None and asyncio.get_running_loop().time() < self._rest_until:
            raise self._trouble
        missing = await self._fill(embedder, spaces, patience=self._waits.patience)
        try:
            (vector,) = await embedder.embed([query], self._waits.query)
        except EmbeddingError as error:
            self._failed(error)
            raise
        self._trouble = None
        return vector, f"{missing} passages are not embedded yet; these were searched by keyword" if missing else None

    async def _fill(self, embedder: Embedder, spaces: tuple[str, ...], *, patience: float | None) -> int:
        """Create missing vectors; return how many are still missing after waiting. Raises EmbeddingError."""
        generation = self._index.generation
        if self._complete.get(spaces) == generation:
            return 0
        missing = await asyncio.to_thread(self._index.missing_vectors, spaces, embedder.name)
        if not missing:
            self._complete[spaces] = generation
            return 0
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._make_vectors(embedder, spaces))
        filling = self._filling
        await asyncio.wait({filling}, timeout=patience)
        if not filling.done():
            return await asyncio.to_thread(self._index.missing_vectors, spaces, embedder.name)
        if not filling.cancelled() and (error := filling.exception()) is not None:
            raise error
        return 0

    async def _make_vectors(self, embedder: Embedder, spaces: tuple[str, ...]) -> None:
        index = self._index
        try:
            while found := await asyncio.to_thread(index.without_vector, spaces, embedder.name, BATCH_TEXTS):
                for start in range(0, len(found), embedder.batch):
                    batch = found[start : start + embedder.batch]
                    vectors = await embedder.embed([text for _, text in batch], self._waits.fill)
                    pairs = [(digest, vector) for (digest, _), vector in zip(batch, vectors, strict=True)]
                    await asyncio.to_thread(index.keep_vectors, embedder.name, pairs)
        except EmbeddingError as error:
            self._failed(error)
            raise

    def _failed(self, error: EmbeddingError) -> None:
        if self._trouble is None:
            log.warning("memory search uses keywords only: %s", error)
        self._trouble = error
        self._rest_until = asyncio.get_running_loop().time() + self._waits.rest


def scaled(score: float, related: float) -> float:
    """Map a raw score to a common scale on which `related`, the threshold of its index, becomes MIN_SCORE.

    0, 1 and the order are preserved.
    """
    if score < related:
        return score * MIN_SCORE / related
    return MIN_SCORE + (score - related) * (1 - MIN_SCORE) / (1 - related)
