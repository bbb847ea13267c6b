"""What calls use of budgets: what they reserve before they start, and what is counted when they end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from farhand.gateway.access.budgets import Budgets
from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.catalog import Target, read_arguments
from farhand.gateway.calls.pinning import TRANSFER
from farhand.gateway.nodes.endpoints import WORKSPACE, longest_id
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import InvalidArgs
from farhand.store.ports import StoreError, Tx
from farhand.store.tables.accounts.budgets import Limit, Unit, Want, take
from farhand.store.tables.calls import CallRecord

# What a call reserves for its result, whose size is not known before.
RESULT_BYTES: Final = 64 * 1024
# A meter stores what it counted after as much.
METER_BYTES: Final = 64 * 1024
METER_SECONDS: Final = 5.0


class Charge(msgspec.Struct, frozen=True):
    """The limits that a call counts against, and the machines it uses."""

    limits: tuple[Limit, ...]
    nodes: tuple[str, ...] = ()
    # Whether the limits leave less time than the call would have had.
    shortens: bool = False

    def taking(self, record: CallRecord, now: int) -> Callable[[Tx], object]:
        """Return the operation that reserves what a call needs; it raises BudgetExceeded."""
        wants = wants_of(len(bytes(record.args)), record.deadline_at - now)
        return partial(take, hold=record.id, limits=self.limits, wants=wants, nodes=self.nodes, now=now)


def wants_of(argument_bytes: int, time_ms: int) -> Mapping[Unit, Want]:
    """Return what a call reserves: it may not run longer than `time_ms`."""
    return {
        Unit.CALLS: Want(1, 1),
        Unit.BYTES: Want(argument_bytes + RESULT_BYTES, argument_bytes + 1),
        Unit.WALL_SECONDS: Want(time_ms, time_ms),
        # Used by model requests; a call needs that something is left.
        Unit.MONEY: Want(0, 1),
        Unit.TOKENS: Want(0, 1),
    }


def used_by(record: CallRecord) -> Mapping[Unit, int]:
    """Return what a call that has ended used beyond one call."""
    size = len(bytes(record.args)) + (0 if record.result is None else memoryview(record.result).nbytes)
    size += len((record.error_message or "").encode(errors="replace"))
    return {Unit.BYTES: size, Unit.WALL_SECONDS: round(record.duration_ms or 0)}


class Meter:
    """Counts what passes through a connection that is not a call, such as that of a terminal."""

    def __init__(self, budgets: Budgets, limits: Sequence[Limit], *, timed: bool) -> None:
        """`timed`: the time of the connection counts too. Call `close` at its end."""
        counted = (Unit.BYTES, Unit.WALL_SECONDS) if timed else (Unit.BYTES,)
        self._budgets = budgets
        self._limits = [limit for limit in limits if limit.unit in counted]
        self._bytes = 0
        self._since = time.monotonic()

    async def add(self, size: int) -> None:
        """Count bytes. Raises Denied once a limit is reached, which may be noticed a little later."""
        self._bytes += size
        if self._limits and (self._bytes >= METER_BYTES or time.monotonic() - self._since >= METER_SECONDS):
            await self.flush()

    async def flush(self) -> None:
        """Store what was counted. Raises Denied once a limit is reached."""
        if not self._limits:
            return
        now = time.monotonic()
        amounts = {Unit.BYTES: self._bytes, Unit.WALL_SECONDS: round((now - self._since) * 1000)}
        self._bytes, self._since = 0, now
        reason = await self._budgets.count(self._limits, amounts)
        if reason is not None:
            raise Denied(reason)

    async def close(self) -> None:
        """Store the rest."""
        with contextlib.suppress(Denied, StoreError):
            await self.flush()


def nodes_of(call: ToolCall, target: Target | None, registry: NodeRegistry) -> tuple[str, ...]:
    if target is None:
        return ()
    if target.node is not None:
        return (target.node.card.node_id,)
    if target.own is not None and target.own.server and target.own.node:
        return (target.own.node,)
    if target.tool == TRANSFER:
        try:
            args = read_arguments(call.args)
        except InvalidArgs:
            return ()
        ends = [args.get(name) for name in ("source", "destination")] if isinstance(args, dict) else []
        return machines_of([end for end in ends if isinstance(end, str)], registry)
    return ()


def machines_of(endpoints: Sequence[str], registry: NodeRegistry) -> tuple[str, ...]:
    """Return the nodes among the ends of a transfer."""
    found = {longest_id(end, registry.nodes) for end in endpoints}
    return tuple(sorted(found - {"", WORKSPACE}))
