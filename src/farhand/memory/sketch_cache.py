"""The sketches that were drawn, and what changed since: to read a hundred thousand vectors again takes a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farhand.memory.vectors import SignIndex, Vector

MOST_GONE = 10_000
# An embedder, and the places whose chunks it has made vectors of.
Key = tuple[str, tuple[str, ...]]
Rows = Sequence[tuple[int, int, bytes]]


class _State:
    """What is known of one key. Chunks have rising numbers, so that a number tells which were there before."""

    def __init__(self) -> None:
        # Up to here every chunk has a vector.
        self.embedded = 0
        self.sketch: SignIndex | None = None
        # Up to here the sketch shows every vector there is, and those of `gone` chunks.
        self.drawn = 0
        self.gone: set[int] = set()
        self.stale = True


class Drawn:
    """For each key its sketch, as long as it is of use."""

    def __init__(self) -> None:
        self._states: dict[Key, _State] = {}

    def added(self, chunk: int) -> None:
        for state in self._states.values():
            state.embedded = min(state.embedded, chunk - 1)
            state.drawn = min(state.drawn, chunk - 1)
            state.stale = True

    def removed(self, chunk: int) -> None:
        for state in self._states.values():
            state.gone.add(chunk)
            state.stale = True
            if len(state.gone) > MOST_GONE:
                state.sketch = None
                state.gone.clear()

    def embedded(self, key: Key) -> int:
        """Up to which number every chunk has a vector."""
        return self._states[key].embedded if key in self._states else 0

    def complete(self, key: Key, last: int) -> None:
        """Every chunk up to the last has a vector now."""
        self._states.setdefault(key, _State()).embedded = last

    def more_vectors(self) -> None:
        for state in self._states.values():
            state.stale = True

    def forget(self) -> None:
        """Vectors are not what they were."""
        self._states.clear()

    def sketch(self, key: Key, rows_after: Callable[[int], Rows], centre: Vector | None, arrays: object) -> SignIndex:
        """Drawn anew where it must be. `rows_after` reads the vectors of the chunks behind a number."""
        state = self._states.setdefault(key, _State())
        if state.sketch is None or (state.stale and arrays is not None and not state.sketch.packed):
            state.sketch = SignIndex(rows_after(0), centre, arrays)
        elif state.stale:
            state.sketch = state.sketch.redrawn(state.drawn, state.gone, rows_after(state.drawn))
        state.drawn = state.embedded
        state.gone.clear()
        state.stale = False
        return state.sketch
