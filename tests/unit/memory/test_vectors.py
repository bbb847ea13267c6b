"""Choosing among many vectors, with numpy and without."""

import random
from typing import Any

import pytest

from farhand.memory.vectors import COMPARED, SignIndex, Vector, mean, numpy, signs, similarity, unit_vector

COUNT = 3 * COMPARED


def some_vectors(dimensions: int) -> list[Vector]:
    chance = random.Random(3)
    return [unit_vector([chance.gauss(0.3, 1) for _ in range(dimensions)]) for _ in range(COUNT)]


@pytest.mark.parametrize("arrays", [None, pytest.param(numpy(), marks=pytest.mark.skipif(numpy() is None, reason=""))])
@pytest.mark.parametrize("dimensions", [64, 100, 384])
def test_the_nearest_are_among_the_chosen(arrays: Any, dimensions: int) -> None:
    vectors = some_vectors(dimensions)
    centre = mean(vectors)
    rows = [(2 * number, 7 * number, signs(vector, centre)) for number, vector in enumerate(vectors)]
    index = SignIndex(rows, centre, arrays)
    query = unit_vector([a + 0.2 * b for a, b in zip(vectors[5], vectors[6], strict=True)])
    chosen = index.nearest(query)
    assert len(chosen) == len(set(chosen)) == COMPARED
    assert 10 in chosen
    wanted = int.from_bytes(signs(query, centre))
    far = sorted((int.from_bytes(bits) ^ wanted).bit_count() for _, _, bits in rows)[COMPARED - 1]
    assert all((int.from_bytes(rows[chunk // 2][2]) ^ wanted).bit_count() <= far for chunk in chosen)
    assert index.vectors([10, 11, 12, 99_999]) == {35: [10], 42: [12]}
    exact = [similarity(query, vector) for vector in vectors]
    assert index.similarities(query, [vector.tobytes() for vector in vectors]) == pytest.approx(exact, abs=1e-5)


@pytest.mark.skipif(numpy() is None, reason="numpy is not installed")
def test_a_query_of_another_length_chooses_something_to_be_found_out_by() -> None:
    vectors = some_vectors(64)
    centre = mean(vectors)
    rows = [(number, number, signs(vector, centre)) for number, vector in enumerate(vectors)]
    assert len(SignIndex(rows, centre, numpy()).nearest(unit_vector([1.0] * 128))) == COMPARED
