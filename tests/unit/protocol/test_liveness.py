"""Pings on a silent link: one for each moment, whatever the timers do."""

from __future__ import annotations

import pytest

from farhand.protocol.liveness import Liveness, LivenessAction


@pytest.mark.parametrize("early", [0.0, 0.0004, 0.004])
def test_a_silence_has_four_pings_however_early_the_timers_fire(early: float) -> None:
    liveness, silent, pings = Liveness(), 0.0, []
    for _ in range(1000):
        look, wait = liveness.check(silent)
        if look is LivenessAction.GIVE_UP:
            break
        if look is LivenessAction.PING:
            pings.append(round(silent))
        silent += max(wait - early, 0.0005)
    assert (look, pings) == (LivenessAction.GIVE_UP, [20, 25, 30, 35])


def test_a_message_restarts_the_time_of_silence() -> None:
    liveness = Liveness()
    assert [liveness.check(silent)[0] for silent in (20.0, 3.0, 20.0, 24.9, 25.0)] == [
        LivenessAction.PING, LivenessAction.WAIT, LivenessAction.PING, LivenessAction.WAIT, LivenessAction.PING,
    ]  # fmt: skip
    assert liveness.check(39.9999) == (LivenessAction.PING, 0.001)
    assert liveness.check(39.99995)[0] is LivenessAction.WAIT
