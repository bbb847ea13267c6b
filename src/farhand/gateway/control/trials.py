"""Trials: what a command changed in a copy-on-write view is shown, kept or discarded where the command ran."""

# The names of parameters are written as those of the node's `Trial`.
# ruff: noqa: N803

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import may_know_call
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, new_call_id
from farhand.machine.sandbox.trials import Trials
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import NotFound
from farhand.protocol.names import join_tool
from farhand.tools.preview import Preview
from farhand.tools.tool import CallContext, Tool, tool
from farhand.tools.trial import NAME, OWN, SPEC, Action, TrialId, TrialTool


class TrialCalls:
    """Ends trials by calls of the machine where they ran. The id of a trial is that of its call."""

    def __init__(self, gate: Gate, trials: Trials) -> None:
        self._gate = gate
        self._local = TrialTool(trials)
        self._own = tool(
            self.trial,
            name=OWN,
            description=SPEC.description,
            capability=SPEC.capability,
            preview=self.preview,
            continues=True,
        )

    def tools(self) -> list[Tool]:
        """Return the tools to serve without offering them."""
        return [self._own]

    async def begin(
        self, trial_id: str, action: str, principal: Principal, *, idempotency_key: str | None = None
    ) -> OpenCall:
        """Show, keep or discard a trial: see `Gate.begin`. Raises NotFound if there is no such call."""
        record = await self._gate.find(trial_id)
        if record is None or not may_know_call(principal, record, record.node_id):
            raise NotFound(f"there is no trial {trial_id[:100]!r}; its id is that of its call: `farhand calls`")
        call = ToolCall(
            id=new_call_id(),
            tool=OWN if record.node_id is None else join_tool(record.node_id, NAME),
            args=msgspec.Raw(msgspec.json.encode({"trialId": record.id, "action": action})),
            agent_id=record.agent_id,
        )
        own = self._own if record.node_id is None else None
        return await self._gate.begin(call, principal=principal, own=own, idempotency_key=idempotency_key)

    async def trial(self, trialId: TrialId, context: CallContext, action: Action = "show") -> dict[str, Any]:  # noqa: ARG002
        return await asyncio.to_thread(self._local.Trial, trialId=trialId, action=action)

    async def preview(self, trialId: str, action: str) -> Preview:
        return await asyncio.to_thread(self._local.preview_Trial, trialId=trialId, action=action)
