"""The tool calls of a run: each passes the gate like any other call, and ends with the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from farhand.agent.tool_outcome import Outcome
from farhand.gateway.access.credentials import Credentials
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate, IdempotencyConflict
from farhand.gateway.calls.open_call import new_call_id
from farhand.gateway.calls.pinning import Pinned, of_a_machine
from farhand.gateway.calls.redaction import redacted
from farhand.gateway.nodes.end_orders import EndOrders
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.nodes.returning import ReturningNodes
from farhand.llm.messages import ToolUse
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import ToolError
from farhand.protocol.names import split_tool
from farhand.store.ports import Store, StoreError
from farhand.store.tables.waiting_calls import Approval
from farhand.tools.tool import Tool

log = logging.getLogger(__name__)

# Ends the commands of these calls that still run on the gateway's own machine.
EndJobs = Callable[[Collection[str]], Coroutine[Any, Any, None]]

NODE_COMMANDS = "Bash"


class RunServices(msgspec.Struct, frozen=True):
    """The services of the gateway that runs use."""

    database: Store
    credentials: Credentials
    node_registry: NodeRegistry
    returning: ReturningNodes
    catalog: Catalog
    gate: Gate
    end_orders: EndOrders


class RunCalls:
    """Calls tools for one run.

    A call is recorded under a key made of its place in the transcript, so that the same call after a restart does not
    start twice and its result is found.
    """

    def __init__(
        self,
        services: RunServices,
        *,
        session_key: str,
        agent_id: str,
        principal: Principal,
        stopped: Callable[[], str | None],
        origins: Sequence[str],
        only: Mapping[str, Tool] | None = None,
        pinned: Pinned | None = None,
        end_jobs: EndJobs | None = None,
        asked: Callable[[Approval], None] = lambda _: None,
    ) -> None:
        """`stopped` returns why the run is being stopped, if it is. `origins`: where the run comes from. `only`: the
        tools of a read-only run, by name; without it, those of the catalog. `pinned`: the tools of some machines only;
        of these, a read-only run has those that only read. `asked` is called when a call waits for approval.
        """
        self._services = services
        self._session_key = session_key
        self._agent_id = agent_id
        self._principal = principal
        self._only = only
        self._pinned = pinned
        self._end_jobs = end_jobs
        self._asked = asked
        self._made: dict[str, str] = {}
        self._stopped = stopped
        self._origins = origins

    def made(self, calls: Mapping[str, str]) -> None:
        """Add calls that this run made before a restart: what they left running belongs to it too."""
        self._made.update(calls)

    async def call(self, use: ToolUse, key: str) -> Outcome:
        """Run the call and return its outcome, even if it failed. Cancelling this ends the call, unless the gateway
        stops.
        """
        own = None if self._only is None else self._only.get(use.name)
        name, given, principal = use.name, use.arguments, self._principal
        if self._pinned is not None:
            name, principal = self._pinned.name(name), self._pinned.principal(principal)
            own = None if own is not None and of_a_machine(use.name, own.spec) else own
            try:
                given = self._pinned.arguments(name, given)
            except ToolError as error:
                return Outcome.failed(error.kind, error.message)
        elsewhere = self._pinned is not None and self._pinned.reads_on_a_node(name)
        if own is None and self._only is not None and not elsewhere:
            return Outcome.failed("not_found", f"tool not found: {use.name}")
        call = ToolCall(new_call_id(), name, msgspec.Raw(given.encode()), self._session_key, self._agent_id)
        gate = self._services.gate
        # Once recording has started, the record must get an end even if the caller is cancelled.
        opening = asyncio.ensure_future(
            gate.begin(call, principal=principal, own=own, idempotency_key=key, origins=self._origins)
        )
        try:
            opened = await asyncio.shield(opening)
            self._made[opened.record.id] = opened.record.tool
            opened.on_approval(self._asked)
            return Outcome.of_result(redacted(await gate.wait(opened), gate.secrets))
        except (StoreError, IdempotencyConflict) as error:
            return Outcome.failed("failed", f"the call was not run: {error}")
        except asyncio.CancelledError:
            reason = self._stopped()
            if reason is None:
                raise
            begun = (await opening).record
            self._made[begun.id] = begun.tool
            ended = await gate.cancel(begun.id, reason)
            assert ended is not None
            return Outcome.of_result(redacted(ended, gate.secrets))

    async def end_processes(self) -> None:
        """End every process that a call of this run started and left running."""
        if self._services.gate.frozen is not None:
            return  # a freeze ends all processes itself
        made = dict(self._made)
        commands: dict[str, list[str]] = {}
        for call_id, name in made.items():
            if (
                (named := split_tool(name))
                and named[1] == NODE_COMMANDS
                and named[0] in self._services.node_registry.nodes
            ):
                commands.setdefault(named[0], []).append(call_id)
        reason = self._stopped() or "the run was stopped"
        work = [self._services.end_orders.end(node_id, call_ids, reason) for node_id, call_ids in commands.items()]
        if self._end_jobs is not None:
            work.append(self._end_jobs(made))
        for failure in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(failure, BaseException):
                log.warning("processes of a stopped run in %s may still be running: %s", self._session_key, failure)
