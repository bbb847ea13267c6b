"""How long a search of the memory takes, by keyword and by vectors, for 100 to 100,000 chunks.

    python -m benchmarks.memory [--chunks N,N,…] [--rounds N] [--dimensions N] [--json]

Measured is `Memory.search` as the tool calls it: the look at the files, the index, the ranking, the threads between.
The vectors are made up (a mixture of directions, as texts have subjects), and the query's is at hand, so that the time
of an embedding model is not counted. The limits, at 10,000 chunks: 30 ms by keyword and 60 ms hybrid, at the median.
`CPU` is the processor time of the median search, which other work on the machine disturbs less. Each query is asked of
every size in turn, so that a slow moment of the machine hits all of them.
`recall` is the share of the ten nearest by exact comparison that the search compares at all.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farhand.memory.memory import EmbeddingTimeouts, Memory
from farhand.memory.sources import FolderSource
from farhand.memory.vectors import Vector, unit_vector

CHUNKS_A_FILE = 20
FLAT = 1.3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--chunks", default="100,1000,10000,100000")
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--dimensions", type=int, default=384)
    options.add_argument("--json", action="store_true", help="one JSON document")
    given = options.parse_args()
    counts = [int(count) for count in given.chunks.split(",")]
    with tempfile.TemporaryDirectory(prefix="farhand-memory-", dir="/var/tmp") as place:
        report = asyncio.run(measure(Path(place), counts, given.rounds, given.dimensions))
    print(json.dumps(report, indent=2) if given.json else as_text(report))


async def measure(place: Path, counts: Sequence[int], rounds: int, dimensions: int) -> dict[str, Any]:
    queries = [ask(chance, vocabulary(random.Random(7))) for chance in map(random.Random, range(rounds))]
    rows = []
    for embedder in (None, Subjects(dimensions)):
        kind = "hybrid" if embedder else "keyword"
        memories = {count: opened(place / str(count), count, embedder) for count in counts}
        first, times, work = {}, defaultdict(list), defaultdict(list)
        for count, memory in memories.items():
            began = time.perf_counter()
            await memory.search("begin", agent="main")
            first[count] = time.perf_counter() - began
        for query in queries:
            for count, memory in memories.items():
                began, busy = time.perf_counter(), time.process_time()
                found = await memory.search(query, agent="main", min_score=0)
                times[count].append(time.perf_counter() - began)
                work[count].append(time.process_time() - busy)
                assert found.index == kind, found.note
        for count, memory in memories.items():
            share = recall(memory, embedder, queries[:10]) if embedder else None
            rows.append(
                {
                    "chunks": count,
                    "kind": kind,
                    "first_s": first[count],
                    "p50_ms": statistics.median(times[count]) * 1000,
                    "p95_ms": sorted(times[count])[int(len(times[count]) * 0.95)] * 1000,
                    "cpu_ms": statistics.median(work[count]) * 1000,
                    "recall": share,
                }
            )
            await memory.close()
    return {"rows": rows}


def as_text(report: dict[str, Any]) -> str:
    lines = [f"{'chunks':>8}{'':10}{'first':>10}{'p50':>10}{'p95':>10}{'CPU':>10}{'recall':>9}"]
    for row in report["rows"]:
        recall = "" if row["recall"] is None else f"{row['recall']:9.3f}"
        lines.append(
            f"{row['chunks']:8}{row['kind']:>10}{row['first_s']:8.2f} s{row['p50_ms']:7.1f} ms{row['p95_ms']:7.1f} ms"
            f"{row['cpu_ms']:7.1f} ms{recall}"
        )
    for kind in dict.fromkeys(row["kind"] for row in report["rows"]):
        cpu = [row["cpu_ms"] for row in report["rows"] if row["kind"] == kind]
        lines.append(f"{kind}, CPU of a search, dearest to cheapest: {max(cpu) / min(cpu):.2f}, wanted <= {FLAT}")
    return "\n".join(lines)


def opened(place: Path, count: int, embedder: Subjects | None) -> Memory:
    workspace = place / "work"
    if not workspace.exists():
        chance = random.Random(7)
        grow(workspace, count, chance, vocabulary(chance))
    sources = [FolderSource(workspace)]
    return Memory(place / "memory.db", lambda _: sources, embedder, waits=EmbeddingTimeouts(patience=3600))


def recall(memory: Memory, embedder: Subjects, queries: Sequence[str]) -> float:
    ((_, spaces),) = memory._index._sign_indexes
    signs = memory._index.sign_index(spaces, embedder.name)
    owners = signs.vectors(signs.ids)
    numbers, everything = zip(*memory._index.vectors(owners), strict=True)
    found = 0
    for query in queries:
        wanted = embedder.vector(query)
        nearest = heapq.nlargest(10, zip(signs.similarities(wanted, everything), numbers, strict=True))
        found += len({owners[number][0] for _, number in nearest} & set(signs.nearest(wanted)))
    return found / (10 * len(queries))


class Subjects:
    """Texts about a subject lie around that subject's direction; all of them off the middle, as real models' do."""

    batch = 512
    threshold = 0.25
    label = "made up"

    def __init__(self, dimensions: int) -> None:
        self.name = f"made up {dimensions}"
        self._dimensions = dimensions
        chance = random.Random(11)
        self._shift = [chance.gauss(0, 0.6) for _ in range(dimensions)]
        self._subjects = [[chance.gauss(0, 1) for _ in range(dimensions)] for _ in range(200)]

    def vector(self, text: str) -> Vector:
        chance = random.Random(text)
        subject = self._subjects[chance.randrange(len(self._subjects))]
        noise = array("f", [chance.random() * 3 - 1.5 for _ in range(self._dimensions)])
        return unit_vector([a + b + c for a, b, c in zip(self._shift, subject, noise, strict=True)])

    async def embed(self, texts: Sequence[str], seconds: float) -> list[Vector]:
        if len(texts) == 1:
            return [self.vector(texts[0])]
        return await asyncio.to_thread(lambda: [self.vector(text) for text in texts])

    async def close(self) -> None:
        pass


def vocabulary(chance: random.Random) -> list[str]:
    return ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 9))) for _ in range(8000)]


def word(chance: random.Random, words: Sequence[str]) -> str:
    # Some words are in nearly every text, most are rare.
    return words[min(int(chance.paretovariate(0.6)) - 1, len(words) - 1)]


def ask(chance: random.Random, words: Sequence[str]) -> str:
    return " ".join(word(chance, words) for _ in range(chance.randint(2, 8)))


def grow(workspace: Path, count: int, chance: random.Random, words: Sequence[str]) -> None:
    """Notes of about 300 characters under headings of their own, 20 a file."""
    (workspace / "memory").mkdir(parents=True)
    for number in range(0, count, CHUNKS_A_FILE):
        notes = [
            f"## {word(chance, words)} {number + place}\n" + " ".join(word(chance, words) for _ in range(45))
            for place in range(min(CHUNKS_A_FILE, count - number))
        ]
        (workspace / "memory" / f"{number}.md").write_text("\n\n".join(notes) + "\n")


if __name__ == "__main__":
    main()
