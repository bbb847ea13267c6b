"""Run slots: start a turn of the agent and deliver its reply."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol
from zoneinfo import ZoneInfo

from farhand.gateway.schedule.job_turns import AgentTurns, maker_of
from farhand.gateway.schedule.scheduler import SlotOutcome, clock
from farhand.gateway.schedule.time_parsing import in_words
from farhand.gateway.sessions.keys import cron_key, main_key
from farhand.protocol.errors import ToolError
from farhand.store.tables.cron import CallSpec, CronJob, Heartbeat, Slot, SlotStatus, SystemEvent, Task

log = logging.getLogger(__name__)

SUMMARY_CHARACTERS = 500


class ReplyDelivery(Protocol):
    async def deliver(self, agent_id: str, text: str, *, channel: str | None, to: str | None, key: str) -> str | None:
        """Accept a message for sending, once for each `key`; return its destination.

        Without `channel` and `to`, it goes to the person who last talked to the agent; returns None if there is none.
        Raises ToolError.
        """


class CronRuns:
    """Run slots; a run is `ok` only if the agent's turn succeeded and its reply was accepted for delivery."""

    def __init__(
        self,
        zone: Callable[[], ZoneInfo],
        turns: AgentTurns,
        heartbeat: Callable[[CronJob, Slot], Awaitable[SlotOutcome]],
        calls: Callable[[CronJob, Slot, CallSpec], Awaitable[SlotOutcome]],
        delivery: ReplyDelivery | None = None,
    ) -> None:
        """Create the runner; `zone` returns the user's current time zone, `calls` makes a tool call."""
        self._zone = zone
        self._turns = turns
        self._delivery = delivery
        self._heartbeat = heartbeat
        self._calls = calls

    async def perform(self, job: CronJob, slot: Slot) -> SlotOutcome:
        if isinstance(job.spec, Heartbeat):
            return await self._heartbeat(job, slot)
        if isinstance(job.spec, CallSpec):
            return await self._calls(job, slot, job.spec)
        spec = job.spec if isinstance(job.spec, Task) else None
        if isinstance(job.spec, SystemEvent):
            session = main_key(job.agent_id)
            turn = await self._turns.take(job, slot, session, self._message(job, slot, job.spec.text))
        else:
            session = cron_key(job.agent_id, job.id)
            text = self._message(job, slot, job.spec.message)
            turn = await self._turns.take(
                job, slot, session, text, model=job.spec.model, thinking=job.spec.thinking, fresh=True
            )
        if turn.status is not SlotStatus.OK:
            return SlotOutcome(turn.status, turn.error or "the agent's turn failed", session_key=session)
        # Work started by a token that is restricted to some tools or nodes reaches people only through an allowed tool.
        wanted = (spec is None or spec.deliver is not False) and not maker_of(job).narrowed
        error, where = await self._deliver(job, slot, spec, turn.reply) if wanted else (None, None)
        summary = turn.reply.strip()[:SUMMARY_CHARACTERS]
        if where:
            summary = f"{summary}\n(delivered to {where})".strip()
        if error is not None and not (spec is not None and spec.best_effort_deliver):
            return SlotOutcome(SlotStatus.ERROR, error, summary or None, session)
        note = f"{summary}\n({error})".strip() if error else summary
        return SlotOutcome(SlotStatus.OK, None, note or None, session)

    async def report(self, job: CronJob, slot: Slot, ended: SlotOutcome) -> None:
        """Report that a job started to fail, to where its replies go or else to where the agent was last addressed."""
        if self._delivery is None or job.hidden:
            return
        text = f"Scheduled job “{job.name}” failed ({ended.status.value}): {ended.error or 'no reason given'}"
        key = f"cron:{job.id}:{slot.slot}:failed"
        named = (job.spec.channel, job.spec.to) if isinstance(job.spec, Task) else (None, None)
        for channel, to in dict.fromkeys((named, (None, None))):
            try:
                await self._delivery.deliver(job.agent_id, text, channel=channel, to=to, key=key)
            except ToolError as error:
                log.warning("failed to report the failure of job %s (%s): %s", job.id, job.name, error.message)
            else:
                return

    async def _deliver(self, job: CronJob, slot: Slot, spec: Task | None, reply: str) -> tuple[str | None, str | None]:
        """Deliver the reply; return the error, if any, and the destination."""
        if not reply.strip():
            return None, None
        channel, to = (spec.channel, spec.to) if spec else (None, None)
        demanded = spec is not None and (spec.deliver is True or channel is not None or to is not None)
        if self._delivery is None:
            return ("the reply was not delivered: this gateway has no channels" if demanded else None), None
        key = f"cron:{job.id}:{slot.slot}:{slot.attempts}"
        try:
            where = await self._delivery.deliver(job.agent_id, reply, channel=channel, to=to, key=key)
        except ToolError as error:
            return f"the reply was not delivered: {error.message}", None
        if where is None and demanded:
            return "the reply was not delivered: no one has written to the agent on a channel yet", None
        return None, where

    def _message(self, job: CronJob, slot: Slot, text: str) -> str:
        lines = [f"[cron · {in_words(clock(), self._zone())}] {text}"]
        if slot.late:
            lines.append(f"(This was due on {in_words(slot.slot, self._zone())} and is late.)")
        if job.node or job.tag:
            place = f"the node {job.node!r}" if job.node else f"a node with the tag {job.tag!r}"
            lines.append(f"(Do this on {place}.)")
        if self._delivery is not None and not (isinstance(job.spec, Task) and job.spec.deliver is False):
            lines.append("(Your reply is delivered by itself; do not send it as a message as well.)")
        return "\n".join(lines)
