"""The life of a call as a table: `(state, event) -> (state, effects)`. Pure: no clock, no tasks, no I/O.

The gate observes events, looks them up here and carries out the effects. A pair that is not in the table cannot occur.
Events that arrive after a call has ended, such as a second answer, are in the table and change nothing.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Final, NamedTuple

from farhand.store.tables.calls import CallState


class OpenState(StrEnum):
    """Where an open call is. `CallState` is what its record shows."""

    # Its record is being committed. A read-only call passes through: it is recorded with its end.
    RECORDING = auto()
    # Recorded and held back until it is approved or its node is online.
    WAITING = auto()
    # Recorded as running; nothing has left the gateway, because it is about to be sent or its node left and may return.
    UNSENT = auto()
    # Its frame has left, or a tool of the gateway runs it.
    RUNNING = auto()
    # It was asked to stop because it was cancelled, and has not confirmed.
    CANCELLING = auto()
    # It was asked to stop because its time is up, and has not confirmed.
    TIMING_OUT = auto()
    # Its end is being committed.
    ENDING = auto()
    # Its end is recorded, or it was refused, or it could not be recorded.
    ENDED = auto()


class CallEvent(StrEnum):
    # -- the store
    RECORDED = auto()
    # Recorded as waiting.
    HELD = auto()
    # The store failed, or the idempotency key belongs to an earlier call.
    NOT_RECORDED = auto()
    # A waiting call is recorded as running.
    STARTED = auto()
    END_RECORDED = auto()
    # The end could not be committed; the recorder tries again.
    END_FAILED = auto()

    # -- what the gate finds when it is about to send
    READY = auto()
    # The node is offline and can resume.
    NODE_AWAY = auto()
    # The node is offline, or another one by now, and cannot resume.
    NODE_GONE = auto()
    # The node cannot read the request.
    REJECTED = auto()
    FROZEN = auto()

    # -- answers of the node or tool
    SUCCEEDED = auto()
    FAILED = auto()
    # It failed because it was stopped.
    STOPPED = auto()
    # The node sent it back: too busy, it did not run.
    BUSY = auto()
    # The outcome cannot be known.
    LOST = auto()

    # -- waiting calls
    # The caller may not make the call any more, or the owner denied it.
    DENIED = auto()
    # It cannot start, for another reason.
    REFUSED = auto()

    # -- stopping; the variants are for a call that was sent
    # The caller left while the call was being recorded.
    HUNG_UP = auto()
    CANCEL = auto()
    CANCEL_OFFLINE = auto()
    CANCEL_UNSUPPORTED = auto()
    DEADLINE = auto()
    DEADLINE_OFFLINE = auto()
    DEADLINE_UNSUPPORTED = auto()
    # The node or tool did not confirm in time that it stopped.
    UNCONFIRMED = auto()

    # -- the node's connection
    # A node that cannot resume left. Calls of one that can resume wait for it, without an event.
    NODE_LEFT = auto()
    # The node is back and ...
    # ... runs the call, or holds its result.
    NODE_KNOWS = auto()
    # ... an earlier process of it accepted the call.
    NODE_ACCEPTED = auto()
    # ... never received it.
    NODE_NEVER_SAW = auto()
    # ... never received it, and no caller waits for it.
    NODE_NEVER_SAW_UNWANTED = auto()
    # ... is another process that knows nothing of it.
    NODE_RESTARTED = auto()


class Effect(StrEnum):
    """What the gate does after a transition, in order."""

    # See whether the call can be sent now, and report it as the next event.
    DISPATCH = auto()
    # Send the request to the node, or start the tool's task.
    SEND = auto()
    # Wait for an approval or the node.
    HOLD = auto()
    # Tell the node or the tool's task to stop.
    SEND_STOP = auto()
    WATCH_CONFIRMATION = auto()
    # Drop a call that was never recorded.
    FORGET = auto()
    # Give the callers the recorded end.
    NOTIFY = auto()
    # Tell the callers that the call ended and that its end is not recorded.
    NOTIFY_UNRECORDED = auto()
    # Let the node forget the result.
    ACKNOWLEDGE = auto()


class RecordEnd(NamedTuple):
    """The effect that commits the end of a call; `note` follows the reason in its message."""

    state: CallState
    note: str = ""
    # The call did not run, and its caller may try again: the idempotency key is free.
    release_key: bool = False


Transition = tuple[OpenState, tuple[Effect | RecordEnd, ...]]


class ImpossibleEvent(Exception):
    """An event that cannot occur in the state of the call."""


def transition(state: OpenState, event: CallEvent) -> Transition:
    """Return the next state and the effects. Raises ImpossibleEvent."""
    found = TABLE.get((state, event))
    if found is None:
        raise ImpossibleEvent(f"a call that is {state} cannot get the event {event}")
    return found


_S, _E = OpenState, CallEvent
_NOT_RUN: Final = "it did not run"
_OFFLINE: Final = "its node is offline and will be asked to stop it when it returns"
_UNSUPPORTED: Final = "its node does not support cancelling and may still finish it"
_UNCONFIRMED: Final = "it was asked to stop and has not confirmed"

_NODE_BACK: Final = (
    _E.NODE_KNOWS,
    _E.NODE_ACCEPTED,
    _E.NODE_NEVER_SAW,
    _E.NODE_NEVER_SAW_UNWANTED,
    _E.NODE_RESTARTED,
)
_ANSWERS: Final = (_E.SUCCEEDED, _E.FAILED, _E.STOPPED, _E.BUSY, _E.LOST)
_STOPS: Final = (
    _E.CANCEL,
    _E.CANCEL_OFFLINE,
    _E.CANCEL_UNSUPPORTED,
    _E.DEADLINE,
    _E.DEADLINE_OFFLINE,
    _E.DEADLINE_UNSUPPORTED,
)


def _end(state: CallState, note: str = "", *, release_key: bool = False) -> Transition:
    return _S.ENDING, (RecordEnd(state, note, release_key),)


def _go(state: OpenState, *effects: Effect) -> Transition:
    return state, effects


def _stay(state: OpenState, *events: CallEvent) -> dict[CallEvent, Transition]:
    return dict.fromkeys(events, _go(state))


def _stopping(state: OpenState, final: CallState) -> dict[CallEvent, Transition]:
    """The first reason to stop counts; an answer that comes before the confirmation is the end."""
    return {
        _E.SUCCEEDED: _end(CallState.OK),
        _E.FAILED: _end(CallState.ERROR),
        _E.BUSY: _end(CallState.ERROR, release_key=True),
        _E.LOST: _end(CallState.UNKNOWN),
        _E.STOPPED: _end(final),
        _E.UNCONFIRMED: _end(final, _UNCONFIRMED),
        _E.NODE_LEFT: _end(CallState.UNKNOWN),
        _E.NODE_KNOWS: _go(state, Effect.SEND_STOP),
        _E.NODE_ACCEPTED: _go(state, Effect.SEND_STOP),
        _E.NODE_NEVER_SAW: _end(final, _NOT_RUN),
        _E.NODE_NEVER_SAW_UNWANTED: _end(final, _NOT_RUN),
        _E.NODE_RESTARTED: _end(CallState.UNKNOWN),
        **_stay(state, *_STOPS),
    }


_STATES: Final[dict[OpenState, dict[CallEvent, Transition]]] = {
    _S.RECORDING: {
        _E.RECORDED: _go(_S.UNSENT, Effect.DISPATCH),
        _E.HELD: _go(_S.WAITING, Effect.HOLD),
        _E.NOT_RECORDED: _go(_S.ENDED, Effect.FORGET),
        _E.HUNG_UP: _end(CallState.CANCELLED, _NOT_RUN, release_key=True),
        _E.CANCEL: _end(CallState.CANCELLED, _NOT_RUN),
        _E.DEADLINE: _end(CallState.TIMEOUT, _NOT_RUN, release_key=True),
        _E.DENIED: _end(CallState.DENIED),
        **_stay(_S.RECORDING, _E.NODE_LEFT, *_NODE_BACK, *_ANSWERS),
    },
    _S.WAITING: {
        _E.STARTED: _go(_S.UNSENT, Effect.DISPATCH),
        _E.DENIED: _end(CallState.DENIED),
        _E.REFUSED: _end(CallState.ERROR),
        _E.CANCEL: _end(CallState.CANCELLED, _NOT_RUN),
        _E.DEADLINE: _end(CallState.TIMEOUT, _NOT_RUN),
        **_stay(_S.WAITING, *_ANSWERS),
    },
    _S.UNSENT: {
        _E.READY: _go(_S.RUNNING, Effect.SEND),
        _E.NODE_AWAY: _go(_S.UNSENT),
        _E.NODE_GONE: _end(CallState.ERROR, _NOT_RUN, release_key=True),
        _E.REJECTED: _end(CallState.ERROR, release_key=True),
        _E.FROZEN: _end(CallState.CANCELLED, _NOT_RUN),
        _E.CANCEL: _end(CallState.CANCELLED, _NOT_RUN),
        _E.DEADLINE: _end(CallState.TIMEOUT, _NOT_RUN, release_key=True),
        **dict.fromkeys(_NODE_BACK, _go(_S.UNSENT, Effect.DISPATCH)),
        **_stay(_S.UNSENT, _E.NODE_LEFT, *_ANSWERS),
    },
    _S.RUNNING: {
        _E.SUCCEEDED: _end(CallState.OK),
        _E.FAILED: _end(CallState.ERROR),
        _E.STOPPED: _end(CallState.ERROR),
        _E.BUSY: _end(CallState.ERROR, release_key=True),
        _E.LOST: _end(CallState.UNKNOWN),
        _E.CANCEL: _go(_S.CANCELLING, Effect.SEND_STOP, Effect.WATCH_CONFIRMATION),
        _E.CANCEL_OFFLINE: _end(CallState.CANCELLED, _OFFLINE),
        _E.CANCEL_UNSUPPORTED: _end(CallState.CANCELLED, _UNSUPPORTED),
        _E.DEADLINE: _go(_S.TIMING_OUT, Effect.SEND_STOP, Effect.WATCH_CONFIRMATION),
        _E.DEADLINE_OFFLINE: _end(CallState.UNKNOWN),
        _E.DEADLINE_UNSUPPORTED: _end(CallState.TIMEOUT, _UNSUPPORTED),
        _E.NODE_LEFT: _end(CallState.UNKNOWN),
        _E.NODE_KNOWS: _go(_S.RUNNING),
        # A node starts a call once, whatever number of times it receives it.
        _E.NODE_ACCEPTED: _go(_S.RUNNING, Effect.DISPATCH),
        _E.NODE_NEVER_SAW: _go(_S.RUNNING, Effect.DISPATCH),
        _E.NODE_NEVER_SAW_UNWANTED: _end(CallState.ERROR, _NOT_RUN),
        _E.NODE_RESTARTED: _end(CallState.UNKNOWN),
        # What DISPATCH finds, for a call that may not have arrived.
        _E.READY: _go(_S.RUNNING, Effect.SEND),
        _E.NODE_AWAY: _go(_S.RUNNING),
        _E.NODE_GONE: _end(CallState.UNKNOWN),
        _E.REJECTED: _end(CallState.ERROR),
        _E.FROZEN: _end(CallState.CANCELLED),
    },
    _S.CANCELLING: _stopping(_S.CANCELLING, CallState.CANCELLED),
    _S.TIMING_OUT: _stopping(_S.TIMING_OUT, CallState.TIMEOUT),
    _S.ENDING: {
        _E.END_RECORDED: _go(_S.ENDED, Effect.NOTIFY, Effect.ACKNOWLEDGE),
        _E.END_FAILED: _go(_S.ENDING, Effect.NOTIFY_UNRECORDED),
        _E.NOT_RECORDED: _go(_S.ENDED, Effect.FORGET),
    },
    _S.ENDED: _stay(_S.ENDED, _E.NOT_RECORDED, _E.END_RECORDED, _E.END_FAILED),
}
# Other tasks learn of an end only after it: what they report by then is too late.
_LATE: Final = (
    _E.RECORDED,
    _E.HELD,
    _E.STARTED,
    _E.DENIED,
    _E.REFUSED,
    _E.HUNG_UP,
    _E.UNCONFIRMED,
    _E.NODE_LEFT,
    *_NODE_BACK,
    *_ANSWERS,
    *_STOPS,
)
for _over in (_S.ENDING, _S.ENDED):
    _STATES[_over] = {**_stay(_over, *_LATE), **_STATES[_over]}

TABLE: Final = {(state, event): found for state, events in _STATES.items() for event, found in events.items()}
