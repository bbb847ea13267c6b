"""A sketch that is kept in step shows what one that is drawn anew would."""

import random
from pathlib import Path

import pytest

from farhand.memory.index import FileText, Index
from farhand.memory.vectors import COMPARED, unit_vector

MODEL = "a model"


@pytest.mark.parametrize("seed", range(4))
def test_a_sketch_keeps_in_step_with_the_index(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    index = Index(tmp_path / "memory.db")
    spaces = ("one", "two")[: chance.randint(1, 2)]
    query = unit_vector([chance.gauss(0, 1) for _ in range(32)])

    def embed(most: int) -> None:
        missing = index.without_vector(spaces, MODEL, most)
        index.keep_vectors(MODEL, [(digest, unit_vector(_numbers(digest))) for digest, _ in missing])

    most_shown = 0
    for step in range(60):
        space = chance.choice(("one", "two"))
        match chance.randint(0, 9):
            case 0 | 1 | 2 | 3 | 4:
                notes = [f"## {step}.{number}\n{chance.random()}\n" for number in range(chance.randint(60, 120))]
                text = FileText(f"memory/{chance.randint(0, 12)}.md", str(step), "\n".join(notes).encode())
                index.update(space, [text], [])
            case 5 | 6:
                index.update(space, [], [f"memory/{chance.randint(0, 12)}.md"])
            case 7 if step % 4 == 0:
                index.forget_all(space)
            case _:
                embed(chance.choice((50, 10_000)))
        if chance.random() < 0.5:
            index.missing_vectors(spaces, MODEL)
        kept = index.sketch(spaces, MODEL)
        fresh = Index(tmp_path / "memory.db")
        anew = fresh.sketch(spaces, MODEL)
        most_shown = max(most_shown, len(kept.ids))
        assert kept.ids == anew.ids
        assert kept.vectors(kept.ids) == anew.vectors(anew.ids)
        assert sorted(kept.nearest(query)) == sorted(anew.nearest(query))
        assert index.missing_vectors(spaces, MODEL) == fresh.missing_vectors(spaces, MODEL)
        fresh.close()
    assert most_shown > COMPARED, "else the signs were not asked"
    index.close()


def _numbers(digest: bytes) -> list[float]:
    chance = random.Random(digest)
    return [chance.gauss(0.2, 1) for _ in range(32)]
