"""Run turns of the agent for scheduled work: each is a run of its session and can be found again by its id."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import cast

import msgspec

from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.access.principal import decode_credential
from farhand.gateway.calls.pinning import Pin
from farhand.gateway.sessions.runs import Run, RunOptions
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.model import Thinking
from farhand.protocol.errors import Failed, NotFound, ToolError
from farhand.store.tables.cron import CronJob, Slot, SlotStatus
from farhand.store.tables.sessions import RunState

_RUNS = uuid.UUID("6f0a3a3e-2b5c-4a58-9a39-4d3e6b8f7c10")


def maker_of(job: CronJob) -> Credential:
    """Return the credential on whose behalf a job runs."""
    return decode_credential(job.made_by) if job.made_by else OWNER


class TurnOutcome(msgspec.Struct, frozen=True):
    """Describe how a turn of the agent ended."""

    status: SlotStatus
    reply: str = ""
    error: str = ""


class AgentTurns:
    """Put messages into sessions and wait for the agent's turns."""

    def __init__(
        self,
        sessions: Sessions,
        hide: Callable[[str], str] = str,
        reduced: Callable[[Credential], Credential] = lambda credential: credential,
    ) -> None:
        """Create the runner.

        `hide` removes the gateway's secrets from a reply, which is shortened elsewhere. `reduced` returns a stored
        credential with the rights that it still has.
        """
        self._sessions = sessions
        self._reduced = reduced
        self._hide = hide

    async def take(
        self,
        job: CronJob,
        slot: Slot,
        session_key: str,
        text: str,
        *,
        model: str | None = None,
        thinking: str | None = None,
        fresh: bool = False,
    ) -> TurnOutcome:
        """Run the turn of one attempt at a slot. After a restart, the same attempt finds the same turn.

        Cancellation stops the turn and every process it started, and returns only after that. If the gateway is
        stopping, the turn continues after the next start instead. `fresh`: start a new conversation in the session.
        """
        run_id = str(uuid.uuid5(_RUNS, f"{job.id} {slot.slot} {slot.attempts}"))
        run: Run | None = None
        try:
            try:
                run = await self._sessions.run(run_id)
            except NotFound:
                run = await self._sessions.send(
                    session_key,
                    text,
                    origin=f"cron:{job.id}",
                    credential=self._reduced(maker_of(job)),
                    options=RunOptions(
                        model=model,
                        thinking=cast(Thinking | None, thinking),
                        fresh=fresh,
                        pin=Pin.of(job.node, job.tag),
                        origins=job.origins,
                    ),
                    kind="cron" if fresh else "chat",
                    title=job.name if fresh else "",
                    run_id=run_id,
                    commands_too=False,
                    own_key=True,
                )
            outcome = await run.reply()
        except asyncio.CancelledError:
            if run is not None and not self._sessions.paused:
                await self._stop(run)
            raise
        except ToolError as error:
            if self._sessions.paused:
                await asyncio.Event().wait()  # wait for cancellation: this turn has not ended
            return TurnOutcome(SlotStatus.ERROR, error=error.message)
        if outcome.ok:
            return TurnOutcome(SlotStatus.OK, self._hide(outcome.reply))
        status = SlotStatus.TIMEOUT if outcome.state is RunState.TIMEOUT else SlotStatus.ERROR
        return TurnOutcome(status, error=outcome.text or f"the agent's turn ended {outcome.state.value}")

    async def _stop(self, run: Run) -> None:
        if run.joined is not None:
            return  # it has joined another run, which must not be stopped here
        self._sessions.ask_to_stop(run, RunState.STOPPED, "its scheduled job ended it")
        with contextlib.suppress(Failed):
            await run.reply()
