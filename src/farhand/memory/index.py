"""The index on disk: chunks, their words and their vectors. It can be rebuilt from the files at any time.

It is a SQLite file of its own, so that damage never affects data that cannot be rebuilt. Every method blocks and may
be called from any thread. A damaged file is replaced by an empty one; `IndexDamaged` tells the caller to fill it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import apsw
import msgspec

from farhand.machine.files.private_files import create_private
from farhand.memory.chunks import chunks
from farhand.memory.schema import COUNTED, LATEST, RANKED, TABLES, VERSION
from farhand.memory.sources import MAIN_FILE
from farhand.memory.vectors import COMPARED, SignIndex, Vector, mean, numpy, signs, vector_of
from farhand.memory.words import TOKENIZER, Term, indexed, query_terms
from farhand.protocol.errors import Failed, FarhandError

log = logging.getLogger(__name__)

CANDIDATES: Final = 50
# How many occurrences of a query's rarest words are ranked, at about a microsecond each. Chunks with the other words
# too are found by a conjunctive query, which is fast.
MOST_RANKED: Final = 500
# How many occurrences of a word are searched for chunks with other words too; of a more frequent word, the latest.
MOST_MET: Final = 10_000
# The frequency of a word with more occurrences is estimated from the latest ones.
MOST_COUNTED: Final = 2_000
# A word in more than a quarter of the chunks does not contribute to the search.
COMMON_PART: Final = 4
COVERAGE_WEIGHT: Final = 0.9

P = ParamSpec("P")
T = TypeVar("T")


class IndexDamaged(FarhandError):
    """The index was damaged and has been replaced by an empty one."""


class FileText(msgspec.Struct, frozen=True):
    """A file as it was read."""

    path: str
    stamp: str
    data: bytes


class IndexedChunk(msgspec.Struct, frozen=True):
    """A chunk as stored in the index."""

    id: int
    space: str
    path: str
    start_line: int
    end_line: int
    headings: str
    text: str
    hash: bytes


def _listed(values: Collection[object]) -> str:
    """Return any number of values as one parameter, for `json_each`."""
    return msgspec.json.encode(list(values)).decode()


def embedded_text(headings: str, text: str) -> str:
    """Return the text that is embedded for a chunk."""
    return f"{headings}\n{text}" if headings else text


def content_hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _guarded(method: Callable[Concatenate[Index, P], T]) -> Callable[Concatenate[Index, P], T]:
    """Serialise calls; replace a damaged index and raise IndexDamaged."""

    @functools.wraps(method)
    def run(self: Index, /, *args: P.args, **options: P.kwargs) -> T:
        with self._lock:
            try:
                return method(self, *args, **options)
            except (apsw.CorruptError, apsw.NotADBError) as error:
                log.warning("memory index %s is damaged (%s); rebuilding it", self.path, error)
                self._begin_anew()
                raise IndexDamaged(f"memory index {self.path} was damaged: {error}") from None
            except apsw.Error as error:
                raise Failed(f"memory index {self.path} cannot be used: {error}") from None

    return run


class Index:
    """The index of all agents. The owner calls `close`."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. A file that cannot be used is replaced."""
        self.path = path
        # Incremented whenever chunks or vectors change.
        self.generation = 0
        self._lock = threading.RLock()
        self._frequencies: dict[Term, int] = {}
        self._count = 0
        # The highest chunk id; later chunks get higher ones.
        self._last = 0
        self._kept: dict[str, int] = {}
        # Valid for one generation only.
        self._sign_indexes: dict[tuple[str, tuple[str, ...]], tuple[int, SignIndex]] = {}
        try:
            self._connection = self._connect()
            self._count_chunks()
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError) as error:
            log.warning("memory index %s cannot be used (%s); rebuilding it", path, error)
            self._begin_anew()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # -- filling ----------------------------------------------------------------------------------------

    @_guarded
    def stamps(self, space: str) -> dict[str, str]:
        return dict(self._rows("SELECT path, stamp FROM files WHERE space = ?", (space,)))

    @_guarded
    def update(self, space: str, changed: Iterable[FileText], gone: Iterable[str]) -> int:
        """Index changed files in one transaction; return how many had new content."""
        new = 0
        with self._connection:
            for path in gone:
                self._forget(space, path)
            for file in changed:
                new += self._take_in(space, file)
        self._changed()
        return new

    @_guarded
    def forget_all(self, space: str) -> None:
        """Remove the chunks of a source. Vectors stay: unchanged text need not be embedded again."""
        with self._connection:
            paths = [path for (path,) in self._rows("SELECT path FROM files WHERE space = ?", (space,))]
            for path in paths:
                self._forget(space, path)
        self._changed()

    def _take_in(self, space: str, file: FileText) -> bool:
        digest = content_hash(file.data)
        known = self._rows(
            "UPDATE files SET stamp = ? WHERE space = ? AND path = ? AND hash = ? RETURNING 1",
            (file.stamp, space, file.path, digest),
        )
        if known:
            return False
        self._forget(space, file.path)
        ((file_id,),) = self._rows(
            "INSERT INTO files (space, path, stamp, hash) VALUES (?, ?, ?, ?) RETURNING id",
            (space, file.path, file.stamp, digest),
        )
        for chunk in chunks(file.data.decode("utf-8-sig", "replace")):
            hashed = content_hash(embedded_text(chunk.headings, chunk.text).encode())
            row = (file_id, space, file.path, chunk.start_line, chunk.end_line, chunk.headings, chunk.text, hashed)
            self._rows(
                "INSERT INTO chunks (file, space, path, start_line, end_line, headings, text, hash)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            number = self._connection.last_insert_rowid()
            self._rows(
                "INSERT INTO words (rowid, text) VALUES (?, ?)",
                (number, _searchable(file.path, chunk.headings, chunk.text)),
            )
        return True

    def _forget(self, space: str, path: str) -> None:
        for (file_id,) in self._rows("DELETE FROM files WHERE space = ? AND path = ? RETURNING id", (space, path)):
            self._rows("DELETE FROM words WHERE rowid IN (SELECT id FROM chunks WHERE file = ?)", (file_id,))
            self._rows("DELETE FROM chunks WHERE file = ?", (file_id,))

    # -- words ------------------------------------------------------------------------------------------

    @_guarded
    def by_keyword(self, spaces: Sequence[str], query: str) -> list[int]:
        """Return the chunks that share the most significant words with a query, in bounded time."""
        known = sorted(filter(self._frequency, query_terms(query)), key=self._frequency)
        common = max(MOST_RANKED, self._count // COMMON_PART)
        terms = [term for term in known if self._frequency(term) <= common] or known
        places = itertools.accumulate(map(self._frequency, terms))
        rare = sum(place <= MOST_RANKED for place in places)
        found: dict[int, None] = {}
        for together in _halved(len(terms), rare):
            found.update(self._holding(terms[:together], spaces, CANDIDATES - len(found)))
        if rare and len(found) < CANDIDATES:
            match = " OR ".join(map(_quoted, terms[:rare]))
            rows = self._rows(RANKED, (match, 0, _listed(spaces), CANDIDATES))
            found.update(dict.fromkeys(chunk for (chunk,) in rows))
        for together in _halved(len(terms) - rare, 1):
            found.update(self._holding(terms[rare : rare + together], spaces, CANDIDATES - len(found)))
        if rare < len(known) and len(found) < CANDIDATES:
            match = " OR ".join(map(_quoted, known))
            rows = self._rows(LATEST, (match, 0, _listed(spaces), CANDIDATES))
            found.update(dict.fromkeys(chunk for (chunk,) in rows))
        return list(found)[:CANDIDATES]

    def _holding(self, terms: Sequence[Term], spaces: Sequence[str], limit: int) -> dict[int, None]:
        """Return the latest chunks that contain all of these words, sorted from the rarest."""
        if limit <= 0:
            return {}
        after = 0
        if (places := self._frequency(terms[0])) > MOST_MET:
            after = self._last - self._last * MOST_MET // places
        match = " AND ".join(map(_quoted, terms))
        return dict.fromkeys(chunk for (chunk,) in self._rows(LATEST, (match, after, _listed(spaces), limit)))

    @_guarded
    def keyword_scores(self, entries: Sequence[IndexedChunk], query: str) -> dict[int, float]:
        """Return how much of a query each chunk contains, 0 to 1, weighting words by their rarity.

        A word that occurs nowhere weighs most, so a chunk that shares only common words with a question scores low.
        """
        terms = query_terms(query)
        weights = {term: self._weight(term) for term in terms}
        total = sum(weights.values())
        if not total:
            return {}
        stems = {term: self._tokens(term.text) for term in terms}
        scores = {}
        for entry in entries:
            tokens = self._tokens(_searchable(entry.path, entry.headings, entry.text))
            counted = Counter(tokens)
            held = 0.0
            dense = 0.0
            for term in terms:
                if term.prefix:
                    times = sum(count for token, count in counted.items() if token.startswith(term.text))
                else:
                    times = min((counted[stem] for stem in stems[term]), default=0)
                if times:
                    held += weights[term]
                    dense += weights[term] * times / (times + 1 + len(tokens) / 100)
            scores[entry.id] = (COVERAGE_WEIGHT * held + (1 - COVERAGE_WEIGHT) * dense) / total
        return scores

    def _weight(self, term: Term) -> float:
        frequency = self._frequency(term)
        return math.log(1 + (self._count - frequency + 0.5) / (frequency + 0.5))

    def _frequency(self, term: Term) -> int:
        """Return in how many chunks a word occurs."""
        known = self._frequencies.get(term)
        if known is None:
            if term.prefix:
                rows = self._rows(
                    "SELECT sum(doc) FROM terms WHERE term >= ? AND term < ?", (term.text, term.text + "\U0010ffff")
                )
                ((found,),) = rows
                known = min(int(found or 0), self._count)
            else:
                known = self._estimate(term)
            if len(self._frequencies) > 100_000:
                self._frequencies.clear()
            self._frequencies[term] = known
        return known

    def _estimate(self, term: Term) -> int:
        if not self._tokens(term.text):
            return 0
        ((count, oldest),) = self._rows(COUNTED, (_quoted(term), MOST_COUNTED))
        if count < MOST_COUNTED:
            return int(count)
        return min(self._count, int(MOST_COUNTED * self._last // (self._last - oldest + 1)))

    def _tokens(self, text: str) -> list[str]:
        tokens: Any = self._tokenizer(
            text.encode(), apsw.FTS5_TOKENIZE_DOCUMENT, None, include_offsets=False, include_colocated=False
        )
        return list(tokens)

    # -- reading ----------------------------------------------------------------------------------------

    @_guarded
    def entries(self, ids: Collection[int]) -> list[IndexedChunk]:
        rows = self._rows(
            "SELECT chunks.id, space, chunks.path, start_line, end_line, headings, text, hash"
            " FROM json_each(?) AS wanted CROSS JOIN chunks ON chunks.id = wanted.value",
            (_listed(ids),),
        )
        return [IndexedChunk(*row) for row in rows]

    @_guarded
    def totals(self, space: str) -> tuple[int, int]:
        """Return how many files and chunks of a source are indexed."""
        ((files,),) = self._rows("SELECT count(*) FROM files WHERE space = ?", (space,))
        ((count,),) = self._rows("SELECT count(*) FROM chunks WHERE space = ?", (space,))
        return files, count

    # -- vectors ----------------------------------------------------------------------------------------

    @_guarded
    def without_vector(self, spaces: Sequence[str], embedder: str, limit: int) -> list[tuple[bytes, str]]:
        """Return hashes and texts without a vector of this embedder, each once."""
        rows = self._rows(
            "SELECT DISTINCT chunks.hash, headings, text FROM chunks LEFT JOIN vectors"
            " ON vectors.hash = chunks.hash AND vectors.embedder = ?"
            " WHERE vectors.hash IS NULL AND space IN (SELECT value FROM json_each(?)) LIMIT ?",
            (embedder, _listed(spaces), limit),
        )
        return [(digest, embedded_text(headings, text)) for digest, headings, text in rows]

    @_guarded
    def missing_vectors(self, spaces: Sequence[str], embedder: str) -> int:
        ((count,),) = self._rows(
            "SELECT count(*) FROM chunks LEFT JOIN vectors ON vectors.hash = chunks.hash AND vectors.embedder = ?"
            " WHERE vectors.hash IS NULL AND space IN (SELECT value FROM json_each(?))",
            (embedder, _listed(spaces)),
        )
        return int(count)

    @_guarded
    def keep_vectors(self, embedder: str, vectors: Sequence[tuple[bytes, Vector]]) -> None:
        """Store vectors. If their length differs from the existing ones, the model changed and those are removed."""
        with self._connection:
            known = self._rows(
                "SELECT length(vector) FROM vectors JOIN coordinates USING (id) WHERE embedder = ? LIMIT 1", (embedder,)
            )
            if known and vectors and known[0][0] != 4 * len(vectors[0][1]):
                self.forget_vectors(embedder)
            centre = self._centre(embedder)
            kept = 0
            for digest, vector in vectors:
                for (vector_id,) in self._rows(
                    "INSERT OR IGNORE INTO vectors (embedder, hash, bits) VALUES (?, ?, ?) RETURNING id",
                    (embedder, digest, signs(vector, centre)),
                ):
                    self._rows("INSERT INTO coordinates VALUES (?, ?)", (vector_id, vector.tobytes()))
                    kept += 1
            self._recentre(embedder, kept)
        self.generation += 1

    @_guarded
    def forget_vectors(self, embedder: str) -> None:
        with self._connection:
            self._rows("DELETE FROM vectors WHERE embedder = ?", (embedder,))
            self._rows("DELETE FROM centres WHERE embedder = ?", (embedder,))
            self._rows("DELETE FROM coordinates WHERE id NOT IN (SELECT id FROM vectors)")
        self._kept.clear()
        self.generation += 1

    @_guarded
    def forget_unused_vectors(self, embedder: str | None) -> None:
        """Remove all vectors except those of this embedder for existing text."""
        with self._connection:
            self._rows(
                "DELETE FROM vectors WHERE embedder IS NOT ? OR hash NOT IN (SELECT hash FROM chunks)", (embedder,)
            )
            self._rows("DELETE FROM centres WHERE embedder IS NOT ?", (embedder,))
            self._rows("DELETE FROM coordinates WHERE id NOT IN (SELECT id FROM vectors)")
        self._kept.clear()
        self.generation += 1

    @_guarded
    def sign_index(self, spaces: Sequence[str], embedder: str) -> SignIndex:
        """Return the sign bits of every vector, read again after each change of the index."""
        key = (embedder, tuple(spaces))
        generation, found = self._sign_indexes.get(key, (-1, None))
        if found is None or generation != self.generation:
            rows = self._rows(
                "SELECT chunks.id, vectors.id, vectors.bits FROM chunks CROSS JOIN vectors"
                " ON vectors.hash = chunks.hash AND vectors.embedder = ?"
                " WHERE space IN (SELECT value FROM json_each(?)) ORDER BY chunks.id",
                (embedder, _listed(spaces)),
            )
            found = SignIndex(rows, self._centre(embedder), numpy() if len(rows) > COMPARED else None)
            self._sign_indexes[key] = self.generation, found
        return found

    @_guarded
    def vectors(self, ids: Collection[int]) -> list[tuple[int, bytes]]:
        """Return the coordinates of vectors by id."""
        return self._rows(
            # CROSS JOIN forces the planner to start from the requested ids.
            "SELECT coordinates.id, vector FROM json_each(?) AS wanted"
            " CROSS JOIN coordinates ON coordinates.id = wanted.value",
            (_listed(ids),),
        )

    def _centre(self, embedder: str) -> Vector | None:
        row = self._rows("SELECT centre FROM centres WHERE embedder = ?", (embedder,))
        return vector_of(row[0][0]) if row else None

    def _recentre(self, embedder: str, kept: int) -> None:
        """Recompute the centre, around which signs are taken, whenever the number of vectors has quadrupled."""
        if embedder in self._kept:
            self._kept[embedder] += kept
        else:
            ((self._kept[embedder],),) = self._rows("SELECT count(*) FROM vectors WHERE embedder = ?", (embedder,))
        count = self._kept[embedder]
        counted = self._rows("SELECT counted FROM centres WHERE embedder = ?", (embedder,))
        if count < COMPARED or (counted and count < 4 * counted[0][0]):
            return
        rows = self._rows(
            "SELECT id, vector FROM vectors JOIN coordinates USING (id) WHERE embedder = ? ORDER BY id", (embedder,)
        )
        step = max(1, len(rows) // (4 * COMPARED))
        centre = mean([vector_of(data) for _, data in rows[::step]])
        self._rows("INSERT OR REPLACE INTO centres VALUES (?, ?, ?)", (embedder, centre.tobytes(), count))
        self._connection.executemany(
            "UPDATE vectors SET bits = ? WHERE id = ?",
            [(signs(vector_of(data), centre), vector_id) for vector_id, data in rows],
        )

    # -- life -------------------------------------------------------------------------------------------

    def _rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        return self._connection.execute(statement, values).fetchall()

    def _changed(self) -> None:
        self.generation += 1
        before = self._count
        self._count_chunks()
        # Counting a common word is slow, and one more note makes no difference to it.
        same = abs(self._count - before) < before // 10
        self._frequencies = {term: n for term, n in self._frequencies.items() if same and n > MOST_RANKED}

    def _count_chunks(self) -> None:
        self._count, self._last = self._rows(  # two subqueries: SQLite optimises each, but not both in one
            "SELECT (SELECT count(*) FROM chunks), (SELECT coalesce(max(id), 0) FROM chunks)"
        )[0]

    def _begin_anew(self) -> None:
        with contextlib.suppress(AttributeError, apsw.Error):
            self._connection.close(force=True)
        for suffix in ("", "-wal", "-shm", "-journal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self._connection = self._connect()
        self._kept.clear()
        self._changed()

    def _connect(self) -> apsw.Connection:
        create_private(self.path)  # SQLite creates its other files with the same mode
        connection = apsw.Connection(str(self.path))
        connection.set_busy_timeout(2000)
        connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", "normal")
        connection.pragma("cache_size", -16_000)
        version = connection.pragma("user_version")
        if version == 0:
            with connection:
                connection.execute(TABLES)
        elif version != VERSION:
            connection.close()
            raise apsw.NotADBError(f"schema version {version} instead of {VERSION}")
        name, *arguments = TOKENIZER
        self._tokenizer = connection.fts5_tokenizer(name, arguments)
        return connection


def _quoted(term: Term) -> str:
    return f'"{term.text}"{" *" if term.prefix else ""}'


def _halved(most: int, least: int) -> Iterable[int]:
    """Yield `most`, half of it, and so on, while greater than `least`."""
    while most > least:
        yield most
        most //= 2


def _searchable(path: str, headings: str, text: str) -> str:
    """Return the indexed text. A note is also found by its file name, such as a date, except for `MEMORY.md`."""
    name = "" if path == MAIN_FILE else path.rpartition("/")[2].removesuffix(".md")
    return indexed(f"{name}\n{headings}\n{text}")
