"""The trials that wait on a machine: one caller does not use up the room of others, nor all of them the owner's."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhand.machine.sandbox.trials import MOST_OF_CALLER, MOST_TRIALS, Trials
from farhand.protocol.errors import Failed
from tests.unit.machine.sandbox.test_trials_killed import Machine


def test_every_caller_has_a_share(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    trials = machine.trials()
    for caller in ("one", "two", "three", ""):
        fill(trials, machine, caller)
    with pytest.raises(Failed, match="20 trials wait"):
        trials.begin("more", "a command", str(machine.root))


def test_a_caller_that_ends_a_trial_may_begin_another(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    trials = machine.trials()
    fill(trials, machine, "one")
    trials.discard("one-0")
    trials.begin("again", "a command", str(machine.root), caller="one")
    # After a restart, too, and for a command that is found again.
    with pytest.raises(Failed, match="5 trials of this caller"):
        machine.trials().begin("more", "a command", str(machine.root), caller="one")
    machine.trials().begin("again", "a command", str(machine.root), caller="one")


def test_all_callers_together_leave_room_to_the_owner(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    trials = machine.trials()
    for number in range(MOST_TRIALS - MOST_OF_CALLER):
        trials.begin(f"trial-{number}", "a command", str(machine.root), caller=f"caller-{number}")
    with pytest.raises(Failed, match="of all but the owner"):
        trials.begin("more", "a command", str(machine.root), caller="new")
    fill(trials, machine, "")


def fill(trials: Trials, machine: Machine, caller: str) -> None:
    for number in range(MOST_OF_CALLER):
        trials.begin(f"{caller or 'owner'}-{number}", "a command", str(machine.root), caller=caller)
    if caller:
        with pytest.raises(Failed, match="5 trials of this caller"):
            trials.begin(f"{caller}-more", "a command", str(machine.root), caller=caller)
