from __future__ import annotations

import msgspec
import pytest

from farhand.gateway.nodes import metrics
from farhand.gateway.nodes.metrics import DAY_SAMPLES, MetricsHistory, Reading

GIB = 1024**3


def reading(cpu: float = 12.5) -> Reading:
    return Reading(cpu, 3 * GIB, 16 * GIB, 100 * GIB, 500 * GIB, 0.75)


def test_samples_come_back_from_a_moment_on() -> None:
    history = MetricsHistory()
    for at in range(5):
        history.add("box", at * 10_000, reading(cpu=at))
    assert [sample.at for sample in history.since("box", 20_000)] == [20_000, 30_000, 40_000]
    last = history.since("box", 40_000)[0]
    assert (last.cpu, last.memory, last.memory_total, last.disk, last.load) == (4.0, 3 * GIB, 16 * GIB, 100 * GIB, 0.75)
    assert history.since("other", 0) == []


def test_a_day_is_kept_and_no_more() -> None:
    history = MetricsHistory()
    for at in range(DAY_SAMPLES + 10):
        history.add("box", at, reading())
    kept = history.since("box", 0)
    assert (len(kept), kept[0].at) == (DAY_SAMPLES, 10)


def test_many_nodes_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_BYTES", 32 * 100)
    history = MetricsHistory()
    for at in range(50):
        for node in range(10):
            history.add(f"n{node}", at, reading())
    assert {len(history.since(f"n{node}", 0)) for node in range(10)} == {10}


def test_forgotten_nodes_are_dropped() -> None:
    history = MetricsHistory()
    for node in ("a", "b"):
        history.add(node, 1, reading())
    history.keep(["b"])
    assert history.since("a", 0) == [] and len(history.since("b", 0)) == 1


GOOD = {"cpu": 5, "memory": 1, "memory_total": 2, "disk": 1, "disk_total": 2, "load": 0}


@pytest.mark.parametrize("wrong", [{"cpu": 1e308}, {"memory": -1}, {"load": "5"}, {"disk": None}, {"cpu": 2**70}])
def test_a_reading_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(GOOD | wrong), type=Reading)
