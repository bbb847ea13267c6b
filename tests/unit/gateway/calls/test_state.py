"""The table of a call's life, enumerated: every state with every event."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.gateway.calls import state as module
from farhand.gateway.calls.state import (
    TABLE,
    CallEvent,
    Effect,
    ImpossibleEvent,
    OpenState,
    RecordEnd,
    transition,
)
from farhand.store.tables.calls import CallState

S, E = OpenState, CallEvent
FINAL = {
    CallState.OK,
    CallState.ERROR,
    CallState.TIMEOUT,
    CallState.CANCELLED,
    CallState.DENIED,
    CallState.UNKNOWN,
}
# A call begins to be recorded, or is found in the store when the gateway starts.
INITIAL = (S.RECORDING, S.WAITING, S.RUNNING)
SENT = (S.RUNNING, S.CANCELLING, S.TIMING_OUT)
UNSENT = (S.RECORDING, S.WAITING, S.UNSENT)
OVER = (S.ENDING, S.ENDED)

STORE = {E.RECORDED, E.HELD, E.NOT_RECORDED, E.STARTED, E.END_RECORDED, E.END_FAILED}
DISPATCHED = {E.READY, E.NODE_AWAY, E.NODE_GONE, E.REJECTED, E.FROZEN}
ANSWERS = {E.SUCCEEDED, E.FAILED, E.STOPPED, E.BUSY, E.LOST}
DECISIONS = {E.DENIED, E.REFUSED}
PLAIN_STOPS = {E.CANCEL, E.DEADLINE}
SENT_STOPS = {E.CANCEL_OFFLINE, E.CANCEL_UNSUPPORTED, E.DEADLINE_OFFLINE, E.DEADLINE_UNSUPPORTED}
NODE_BACK = {E.NODE_KNOWS, E.NODE_ACCEPTED, E.NODE_NEVER_SAW, E.NODE_NEVER_SAW_UNWANTED, E.NODE_RESTARTED}
NODE = NODE_BACK | {E.NODE_LEFT}

POSSIBLE = {
    S.RECORDING: {E.RECORDED, E.HELD, E.NOT_RECORDED, E.DENIED, E.HUNG_UP} | ANSWERS | PLAIN_STOPS | NODE,
    S.WAITING: {E.STARTED} | DECISIONS | ANSWERS | PLAIN_STOPS,
    S.UNSENT: DISPATCHED | ANSWERS | PLAIN_STOPS | NODE,
    S.RUNNING: DISPATCHED | ANSWERS | PLAIN_STOPS | SENT_STOPS | NODE,
    S.CANCELLING: {E.UNCONFIRMED} | ANSWERS | PLAIN_STOPS | SENT_STOPS | NODE,
    S.TIMING_OUT: {E.UNCONFIRMED} | ANSWERS | PLAIN_STOPS | SENT_STOPS | NODE,
    S.ENDING: set(E) - DISPATCHED,
    S.ENDED: set(E) - DISPATCHED,
}


def ends(effects: tuple[Effect | RecordEnd, ...]) -> list[RecordEnd]:
    return [effect for effect in effects if isinstance(effect, RecordEnd)]


def rows() -> Iterator[tuple[OpenState, CallEvent, OpenState, tuple[Effect | RecordEnd, ...]]]:
    for (state, event), (after, effects) in TABLE.items():
        yield state, event, after, effects


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_every_pair_is_in_the_table_or_raises(state: OpenState, event: CallEvent) -> None:
    if event in POSSIBLE[state]:
        after, effects = transition(state, event)
        assert isinstance(after, OpenState)
        assert all(isinstance(effect, Effect | RecordEnd) for effect in effects)
    else:
        with pytest.raises(ImpossibleEvent, match=f"{state} cannot get the event {event}"):
            transition(state, event)


def test_the_table_has_no_other_rows() -> None:
    assert set(TABLE) == {(state, event) for state, events in POSSIBLE.items() for event in events}


def test_an_end_is_recorded_exactly_when_a_call_begins_to_end() -> None:
    for state, event, after, effects in rows():
        begins_to_end = state not in OVER and after is S.ENDING
        assert len(ends(effects)) == begins_to_end, (state, event)
        assert all(end.state in FINAL for end in ends(effects)), (state, event)


def test_a_call_ends_only_through_the_store() -> None:
    for state, event, after, _ in rows():
        if after is S.ENDED and state is not S.ENDED:
            assert event in (E.END_RECORDED, E.NOT_RECORDED), (state, event)


@pytest.mark.parametrize("first", INITIAL)
def test_every_path_ends_in_exactly_one_final_state(first: OpenState) -> None:
    """Walk all paths; what matters of a path is its state and which ends it has recorded."""
    seen = {(first, ())}
    todo: list[tuple[OpenState, tuple[CallState, ...]]] = [(first, ())]
    while todo:
        state, recorded = todo.pop()
        for event in POSSIBLE[state]:
            after, effects = transition(state, event)
            found = (after, recorded + tuple(end.state for end in ends(effects)))
            if found not in seen:
                seen.add(found)
                todo.append(found)
    at_the_end = {recorded for state, recorded in seen if state is S.ENDED}
    never_recorded = {()} if first is S.RECORDING else set()
    assert at_the_end - never_recorded == {
        (final,) for final in FINAL if first in UNSENT or final is not CallState.DENIED
    }
    assert all(len(recorded) <= 1 for _, recorded in seen)


def test_every_state_leads_to_the_end() -> None:
    leads = {S.ENDED}
    for _ in S:
        leads |= {state for state, _, after, _ in rows() if after in leads}
    assert leads == set(S)


def test_nothing_is_sent_after_an_end_or_a_stop() -> None:
    for state, event, after, effects in rows():
        if Effect.SEND in effects:
            assert state in (S.UNSENT, S.RUNNING) and event is E.READY and after is S.RUNNING
        if Effect.DISPATCH in effects:
            assert after in (S.UNSENT, S.RUNNING), (state, event)
    for state, after in ((state, after) for state, _, after, _ in rows()):
        order = list(S)
        assert after is state or order.index(after) > order.index(state), "a call never goes back"


def test_a_call_is_sent_again_only_when_its_node_may_not_have_it() -> None:
    again = {event for state, event, _, effects in rows() if state is S.RUNNING and Effect.DISPATCH in effects}
    assert again == {E.NODE_NEVER_SAW, E.NODE_ACCEPTED}


def test_a_call_that_was_not_sent_has_no_outcome_of_a_node() -> None:
    for state, event, _, effects in rows():
        for end in ends(effects):
            if state in UNSENT:
                assert end.state not in (CallState.OK, CallState.UNKNOWN), (state, event)
            if end.state is CallState.DENIED:
                assert state in (S.RECORDING, S.WAITING), (state, event)


def test_only_its_node_can_report_that_a_sent_call_did_not_run() -> None:
    never = {E.NODE_NEVER_SAW, E.NODE_NEVER_SAW_UNWANTED}
    for state, event, _, effects in rows():
        for end in ends(effects):
            if state in SENT:
                assert ("did not run" in end.note) == (event in never), (state, event)


def test_a_key_is_released_only_for_what_did_not_run_and_may_be_tried_again() -> None:
    released = {(state, event) for state, event, _, effects in rows() for end in ends(effects) if end.release_key}
    assert released == {
        (S.RECORDING, E.DEADLINE),
        (S.RECORDING, E.HUNG_UP),
        (S.UNSENT, E.DEADLINE),
        (S.UNSENT, E.NODE_GONE),
        (S.UNSENT, E.REJECTED),
        *((state, E.BUSY) for state in SENT),
    }


@pytest.mark.parametrize(
    ("state", "stop", "final"),
    [(S.CANCELLING, E.CANCEL, CallState.CANCELLED), (S.TIMING_OUT, E.DEADLINE, CallState.TIMEOUT)],
)
def test_a_stop_is_sent_and_its_confirmation_watched(state: OpenState, stop: CallEvent, final: CallState) -> None:
    assert transition(S.RUNNING, stop) == (state, (Effect.SEND_STOP, Effect.WATCH_CONFIRMATION))
    for other in PLAIN_STOPS | SENT_STOPS:
        assert transition(state, other) == (state, ()), "the first reason counts"
    other_final = CallState.TIMEOUT if final is CallState.CANCELLED else CallState.CANCELLED
    reached = {end.state for event in POSSIBLE[state] for end in ends(transition(state, event)[1])}
    assert reached == {CallState.OK, CallState.ERROR, CallState.UNKNOWN, final} and other_final not in reached
    for event in (E.STOPPED, E.UNCONFIRMED, E.NODE_NEVER_SAW):
        assert ends(transition(state, event)[1])[0].state is final
    assert {into for into, _, after, _ in rows() if after is state} == {S.RUNNING, state}


def test_callers_and_nodes_hear_of_an_end_only_from_the_store() -> None:
    for state, event, _, effects in rows():
        if {Effect.NOTIFY, Effect.ACKNOWLEDGE} & set(effects):
            assert (state, event) == (S.ENDING, E.END_RECORDED)
        if Effect.NOTIFY_UNRECORDED in effects:
            assert (state, event) == (S.ENDING, E.END_FAILED)
        if Effect.FORGET in effects:
            assert event is E.NOT_RECORDED and state in (S.RECORDING, S.ENDING)


def test_an_ended_call_stays_ended() -> None:
    for state, event in itertools.product(OVER, ANSWERS | DECISIONS | PLAIN_STOPS | SENT_STOPS | NODE | {E.STARTED}):
        assert transition(state, event) == (state, ())


LIVES = [
    ([E.RECORDED, E.READY, E.SUCCEEDED, E.END_RECORDED], CallState.OK),
    ([E.RECORDED, E.READY, E.FAILED, E.END_RECORDED], CallState.ERROR),
    ([E.RECORDED, E.READY, E.SUCCEEDED, E.END_FAILED, E.SUCCEEDED, E.END_RECORDED], CallState.OK),
    ([E.CANCEL, E.RECORDED, E.END_RECORDED], CallState.CANCELLED),
    ([E.RECORDED, E.NODE_AWAY, E.NODE_RESTARTED, E.READY, E.SUCCEEDED, E.END_RECORDED], CallState.OK),
    ([E.RECORDED, E.NODE_AWAY, E.DEADLINE, E.END_RECORDED], CallState.TIMEOUT),
    ([E.RECORDED, E.NODE_GONE, E.END_RECORDED], CallState.ERROR),
    ([E.RECORDED, E.READY, E.NODE_NEVER_SAW, E.READY, E.SUCCEEDED, E.END_RECORDED], CallState.OK),
    ([E.RECORDED, E.READY, E.NODE_RESTARTED, E.END_RECORDED], CallState.UNKNOWN),
    ([E.RECORDED, E.READY, E.NODE_LEFT, E.SUCCEEDED, E.END_RECORDED], CallState.UNKNOWN),
    ([E.RECORDED, E.READY, E.DEADLINE_OFFLINE, E.END_RECORDED], CallState.UNKNOWN),
    ([E.RECORDED, E.READY, E.CANCEL, E.NODE_KNOWS, E.STOPPED, E.END_RECORDED], CallState.CANCELLED),
    ([E.RECORDED, E.READY, E.CANCEL, E.SUCCEEDED, E.END_RECORDED], CallState.OK),
    ([E.RECORDED, E.READY, E.DEADLINE, E.CANCEL, E.UNCONFIRMED, E.END_RECORDED], CallState.TIMEOUT),
    ([E.RECORDED, E.FROZEN, E.END_RECORDED], CallState.CANCELLED),
    ([E.HELD, E.STARTED, E.READY, E.SUCCEEDED, E.END_RECORDED], CallState.OK),
    ([E.HELD, E.DENIED, E.STARTED, E.END_RECORDED], CallState.DENIED),
    ([E.HELD, E.DEADLINE, E.END_RECORDED], CallState.TIMEOUT),
    ([E.HELD, E.REFUSED, E.END_RECORDED], CallState.ERROR),
]


@pytest.mark.parametrize(
    ("events", "final"), LIVES, ids=lambda value: "-".join(value) if isinstance(value, list) else ""
)
def test_lives(events: list[CallEvent], final: CallState) -> None:
    state, recorded = S.RECORDING, []
    for event in events:
        state, effects = transition(state, event)
        recorded += ends(effects)
    assert state is S.ENDED and [end.state for end in recorded] == [final]


def test_the_table_is_pure() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "enum", "typing", "farhand.store.tables.calls"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.AsyncFunctionDef)]
