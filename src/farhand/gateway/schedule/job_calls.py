"""Run slots of jobs that call a tool, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from farhand.gateway.access.credentials import Credential
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import new_call_id
from farhand.gateway.calls.pinning import Pin, Pinned
from farhand.gateway.calls.policy_subject import VIA
from farhand.gateway.calls.redaction import redacted
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.schedule.job_turns import maker_of
from farhand.gateway.schedule.scheduler import SlotOutcome
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import FarhandError, ToolError
from farhand.protocol.json_limits import decode_bounded
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.cron import CallSpec, CronJob, Slot, SlotStatus

SUMMARY_CHARACTERS: Final = 500
_STATUSES: Final = {CallState.TIMEOUT: SlotStatus.TIMEOUT, CallState.UNKNOWN: SlotStatus.UNKNOWN}


class JobCalls:
    """Make the calls of jobs, with the rights of its maker."""

    def __init__(
        self,
        gate: Gate,
        catalog: Catalog,
        node_registry: NodeRegistry,
        reduced: Callable[[Credential], Credential],
    ) -> None:
        """`reduced` returns a stored credential with the rights that it still has."""
        self._gate = gate
        self._catalog = catalog
        self._node_registry = node_registry
        self._reduced = reduced

    async def perform(self, job: CronJob, slot: Slot, spec: CallSpec) -> SlotOutcome:
        """Make the call of one attempt at a slot. After a restart, the same attempt finds the same call.

        Cancellation cancels the call, unless the gateway stops: it then continues after the next start.
        """
        maker = self._reduced(maker_of(job))
        principal = Principal.agent(job.by_agent, maker) if job.by_agent else Principal(maker)
        tool, args = spec.tool, msgspec.json.encode(spec.args)
        if (pin := Pin.of(job.node, job.tag)) is not None:
            pinned = Pinned(pin, self._catalog, self._node_registry)
            tool, principal = pinned.name(tool), pinned.principal(principal)
            try:
                args = pinned.arguments(tool, args.decode()).encode()
            except ToolError as error:
                return SlotOutcome(SlotStatus.ERROR, f"{error.kind}: {error.message}")
        call = ToolCall(
            new_call_id(),
            tool,
            msgspec.Raw(args),
            timeout_ms=None if spec.timeout_seconds is None else round(spec.timeout_seconds * 1000),
        )
        origins = (f"cron:{job.id}", *(f"{VIA}{origin}" for origin in job.origins))
        key = f"cron:{job.id}:{slot.slot}:{slot.attempts}"
        opening = asyncio.ensure_future(
            self._gate.begin(call, principal=principal, idempotency_key=key, origins=origins)
        )
        try:
            opened = await asyncio.shield(opening)
            return self._ended(await self._gate.wait(opened))
        except asyncio.CancelledError:
            if not self._gate.closing:
                await self._gate.cancel((await opening).record.id, "its scheduled job ended it")
            raise
        except FarhandError as error:
            return SlotOutcome(SlotStatus.ERROR, str(error))

    def _ended(self, record: CallRecord) -> SlotOutcome:
        where = f"call {record.id}"
        result = redacted(record, self._gate.secrets)
        if result.error is not None:
            status = _STATUSES.get(record.state, SlotStatus.ERROR)
            return SlotOutcome(status, f"{result.error.kind}: {result.error.message} ({where})")
        raw = bytes(result.result)
        try:
            value = decode_bounded(raw)
        except msgspec.MsgspecError:
            value = None
        summary = f"{_text(value, raw)}\n({where})".strip()
        if isinstance(value, dict) and value.get("status") == "failed":  # a command that did not succeed
            how = "timed out" if value.get("timedOut") else f"exit code {value.get('exitCode')}"
            how = f"signal {value['signal']}" if value.get("signal") else how
            return SlotOutcome(SlotStatus.TIMEOUT if value.get("timedOut") else SlotStatus.ERROR, how, summary)
        return SlotOutcome(SlotStatus.OK, None, summary)


def _text(value: Any, raw: bytes) -> str:
    """Return what a result says, at most the end of it."""
    texts = [value.get(name) for name in ("output", "content", "text")] if isinstance(value, dict) else [value]
    text = next((one for one in texts if isinstance(one, str)), raw.decode(errors="replace"))
    return text.strip()[-SUMMARY_CHARACTERS:]
