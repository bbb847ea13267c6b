"""Pings on a silent link: one for each moment, whatever the timers do."""

from __future__ import annotations

import pytest

from farhand.protocol.liveness import Liveness, Look


@pytest.mark.parametrize("early", [0.0, 0.0004, 0.004])
def test_a_silence_has_four_pings_however_early_the_timers_fire(early: float) -> None:
    liveness, silent, pings = Liveness(), 0.0, []
    for _ in range(1000):
        look, wait = liveness.look(silent)
        if look is Look.GIVE_UP:
            break
        if look is Look.PING:
            pings.append(round(silent))
        silent += max(wait - early, 0.0005)
    assert (look, pings) == (Look.GIVE_UP, [20, 25, 30, 35])


def test_after_a_word_the_silence_begins_anew() -> None:
    liveness = Liveness()
    assert [liveness.look(silent)[0] for silent in (20.0, 3.0, 20.0, 24.9, 25.0)] == [
        Look.PING, Look.WAIT, Look.PING, Look.WAIT, Look.PING,
    ]  # fmt: skip
    assert liveness.look(39.9999) == (Look.PING, 0.001)
    assert liveness.look(39.99995)[0] is Look.WAIT
