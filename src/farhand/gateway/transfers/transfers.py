"""Transfers of files and folders between nodes and the workspace, recorded from start to end.

A transfer survives disconnects and restarts: when an end disconnects, it waits for its return, and what the receiver
has is not sent again. Transfers that were open when the gateway stopped resume after the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from farhand.gateway.access.credentials import Credential
from farhand.gateway.calls.open_call import UNKNOWN
from farhand.gateway.nodes.endpoints import Endpoint, read_endpoint
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.nodes.registry import Connection, NodeRegistry
from farhand.gateway.repeating import BackgroundTasks, set_within
from farhand.gateway.transfers.gateway_endpoints import OwnReceiver, OwnSender
from farhand.gateway.transfers.relay import Interrupted, NodeParty, Party, Role, StartAgain, Stream
from farhand.gateway.transfers.splice_relay import CAN_CARRY, SpliceRelay
from farhand.protocol.errors import (
    Cancelled,
    ErrorKind,
    Failed,
    InvalidArgs,
    NotFound,
    ProtocolError,
    Timeout,
    ToolError,
)
from farhand.protocol.frames import read_header
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.messages import (
    TransferCredit,
    TransferDone,
    TransferOpen,
    TransferReady,
    TransferStop,
    encode,
)
from farhand.protocol.names import source_name
from farhand.protocol.version import MIB
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables.accounts.budgets import Unit, settle
from farhand.store.tables.transfers import (
    TransferRecord,
    TransferState,
    begin_transfer,
    find_transfer,
    newest_transfers,
    open_transfers,
    save_transfer,
)

log = logging.getLogger(__name__)

# Maximum active transfers; others wait. Each may hold a window of bytes in the gateway's memory.
MAX_ACTIVE = 8
# Maximum active transfers of one node, at either end.
MAX_ACTIVE_OF_ONE = 5
# Maximum active transfers of one token.
MAX_ACTIVE_OF_TOKEN = 3
MAX_OPEN = 1000
# How long an end may be offline before the transfer fails.
AWAY_SECONDS = 60.0
# How long both connected ends may be silent.
IDLE_SECONDS = 120.0
# Bytes that a slow disk reads per second: an end that rereads earlier data may be silent for longer.
REREAD_BYTES = 16 * MIB
# How long a transfer that keeps breaking off may make no progress.
BROKEN_SECONDS = 300.0
PROGRESS_SECONDS = 1.0
STARTS_AGAIN = 3
HELD_SECONDS = 10.0
# Maximum unfinished transfers a node may report at once; it is asked about the others when it reconnects.
MOST_HELD = 1000
TRUTH_SECONDS = 2.5
AS_IT_WAS = "the destination is as it was"
NOT_KNOWN = "whether the destination had been replaced before is not known: its node does not say"
UPLOAD = "(upload)"
# Recorded as the destination if the end is an HTTP request.
DOWNLOAD = "(download)"


# An endpoint inside the gateway. `attach` is called for every attempt, `close` once, after the transfer.
OwnEnd = OwnSender | OwnReceiver


class Claim(Protocol):
    """Maps a repeated request to the transfer it started. Both methods may raise."""

    def look(self, store: Tx) -> str:
        """Return the id of the transfer for this request: an earlier one if the request is repeated."""

    def take(self, store: Tx) -> str:
        """Do the same as `look`, and store the mapping."""


# Takes the id of a transfer, its ends, its credential and its agent. Raises ToolError if it may not go on.
CheckFolder = Callable[[str, Mapping[str, str], str, str | None], Awaitable[None]]

# Takes the id of a transfer, its ends, its credential and its size. Raises ToolError if a budget does not allow it.
Reserve = Callable[[str, Mapping[str, str], str, int], Awaitable[None]]

# Makes the workspace endpoint of a transfer: for an agent, at a path, in a role.
MakeEnd = Callable[[str | None, str, Role], OwnEnd]


class OpenTransfer:
    def __init__(self, record: TransferRecord, source: Endpoint, destination: Endpoint) -> None:
        self.record = record
        self.source = source
        self.destination = destination
        self.own: dict[Role, OwnEnd] = {}
        self.task: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[TransferRecord] = asyncio.get_running_loop().create_future()
        self.cancelled: str | None = None
        # Whether the receiver may have everything, and may have put it in place.
        self.whole = False
        # Whether it has stopped and its end is about to be recorded.
        self.settling = False
        self.manifest_bytes = 0
        # The connections whose dedicated relay failed: they use the node sockets from then on.
        self.uncarried: tuple[Connection, Connection] | None = None
        self.noted_at = 0.0
        self.offset = 0
        # When it last progressed, and to which offset, in any attempt.
        self.moved_at = time.monotonic()


class Transfers:
    """Runs transfers. Call `recover` before the first, `close` after the last."""

    def __init__(
        self,
        database: Store,
        node_registry: NodeRegistry,
        queries: Queries,
        *,
        workspace: MakeEnd | None = None,
        frozen: Callable[[], FreezeOrder | None] = lambda: None,
        invalid: Callable[[Iterable[str]], str | None] = lambda _: None,
        check_folder: CheckFolder | None = None,
        reserve: Reserve | None = None,
        first_number: int = 1,
    ) -> None:
        """`workspace` makes the endpoints named `gsv:`. `frozen` returns the order under which no transfer starts,
        `invalid` why a transfer of some credentials is no longer valid. `check_folder` applies the policy to a transfer
        whose source turns out to be a folder. `reserve` counts it against budgets.
        `first_number`: where the numbers of streams begin.
        """
        self._check_folder = check_folder
        self._reserve = reserve
        self._database = database
        self._node_registry = node_registry
        self._queries = queries
        self._workspace = workspace
        self._open: dict[str, OpenTransfer] = {}
        self._streams: dict[int, Stream] = {}
        # By ticket: the attempt, the end, and the address it must come from.
        self._tickets: dict[str, tuple[SpliceRelay, Role, str]] = {}
        self._numbers = itertools.count(first_number)
        self._slots = asyncio.Semaphore(MAX_ACTIVE)
        self._shares: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_ACTIVE_OF_ONE))
        self._token_shares: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_ACTIVE_OF_TOKEN)
        )
        self._arrivals = asyncio.Event()
        self._asking = BackgroundTasks()
        self._closing = False
        self._frozen = frozen
        self._invalid = invalid

    # -- requests ---------------------------------------------------------------------------------------

    async def begin(
        self,
        transfer_id: str,
        source: str,
        destination: str,
        *,
        credential: str,
        agent_id: str | None = None,
        claim: Claim | None = None,
        own: dict[Role, OwnEnd] | None = None,
    ) -> OpenTransfer | TransferRecord:
        """Record a transfer and start it. If its id is known already, return that transfer.

        `claim` may name an earlier transfer for the same request. An end in `own` is not resolved: its endpoint is only
        a name. Raises InvalidArgs, NotFound, Failed before anything was done, and StoreError.
        """
        if (known := self._open.get(transfer_id) or await self.find(transfer_id)) is not None:
            return known
        if claim is not None and (first := await self._database.read(claim.look)) != transfer_id:
            return await self._earlier(first)  # wherever its nodes are now
        if (order := self._frozen()) is not None:
            raise order.refusal()
        ends = self.ends(source, destination, own or {})
        for role, end in zip(("Source", "Destination"), ends, strict=True):
            if end.node_id and not end.in_workspace:
                self._connection(role, end)
        if self._closing:
            raise Failed("the gateway is stopping; the transfer did not start")
        if len(self._open) >= MAX_OPEN:
            raise Failed(f"busy: {len(self._open)} transfers are open; try again later")
        record = TransferRecord(
            id=transfer_id,
            source=source,
            destination=destination,
            agent_id=agent_id,
            credential=credential,
            created_at=self._node_registry.clock(),
        )
        opened = OpenTransfer(record, *ends)
        opened.own.update(own or {})
        self._make_own(opened)

        def write(store: Tx) -> str:
            first = claim.take(store) if claim is not None else transfer_id
            if first == transfer_id:
                begin_transfer(store, record)
            return first

        self._open[transfer_id] = opened
        writing = self._database.write(write)
        try:
            first = await asyncio.shield(writing)
        except asyncio.CancelledError:
            # It is being stored in any case; once it is, its end is too.
            opened.cancelled = "cancelled before it began"
            writing.add_done_callback(lambda written: self._begun(opened, written))
            raise
        except BaseException:
            del self._open[transfer_id]
            raise
        if first != transfer_id:
            del self._open[transfer_id]
            return await self._earlier(first)
        self._start(opened)
        return opened

    async def _earlier(self, transfer_id: str) -> OpenTransfer | TransferRecord:
        earlier = self._open.get(transfer_id) or await self.find(transfer_id)
        if earlier is None:
            raise StoreError(f"transfer {transfer_id} is not in the record")
        return earlier

    def _begun(self, opened: OpenTransfer, written: asyncio.Future[str]) -> None:
        if not written.cancelled() and written.exception() is None and written.result() == opened.record.id:
            self._start(opened)
        else:
            del self._open[opened.record.id]
            opened.ended.cancel()

    async def wait(self, begun: OpenTransfer | TransferRecord) -> TransferRecord:
        return begun if isinstance(begun, TransferRecord) else await asyncio.shield(begun.ended)

    async def find(self, transfer_id: str) -> TransferRecord | None:
        opened = self._open.get(transfer_id)
        if opened is not None:
            return opened.record
        return await self._database.read(lambda store: find_transfer(store, transfer_id))

    async def newest(self, limit: int) -> list[TransferRecord]:
        found = await self._database.read(lambda store: newest_transfers(store, limit))
        return [self._open[each.id].record if each.id in self._open else each for each in found]

    async def cancel(self, transfer_id: str, reason: str = "cancelled on request") -> TransferRecord | None:
        """Stop a transfer and return its record; one that has ended is returned unchanged."""
        opened = self._open.get(transfer_id)
        if opened is None:
            return await self.find(transfer_id)
        self._stop(opened, reason)
        return await asyncio.shield(opened.ended)

    @staticmethod
    def _stop(opened: OpenTransfer, reason: str) -> None:
        if opened.cancelled is None:
            opened.cancelled = reason
            if opened.task is not None and not opened.settling:
                opened.task.cancel()

    def credential_ended(self, token_id: str) -> None:
        """Cancel the transfers of a token that was revoked or has expired."""
        for opened in self._open.values():
            if opened.record.credential == token_id:
                self._stop(opened, self._invalid([token_id]) or f"the token {token_id} was revoked")

    async def stop_all(self, reason: str) -> int:
        """Cancel every transfer and return their number."""
        return len(await asyncio.gather(*(self.cancel(transfer_id, reason) for transfer_id in list(self._open))))

    async def recover(self, own: Callable[[Tx], Collection[str]] | None = None) -> None:
        """Resume the transfers that were open when the gateway last stopped; with `own`, those that it returns."""
        found, wanted = await self._database.read(lambda tx: (open_transfers(tx), None if own is None else own(tx)))
        for record in found:
            if (wanted is not None and record.id not in wanted) or record.id in self._open:
                continue
            try:
                if (order := self._frozen()) is not None:
                    raise Cancelled(order.summary)
                if (reason := self._invalid([record.credential])) is not None:
                    raise Cancelled(reason)
                if {record.source, record.destination} & {UPLOAD, DOWNLOAD}:
                    raise Failed("the gateway stopped while the file passed through it; begin again")
                opened = OpenTransfer(record, *self.ends(record.source, record.destination))
                self._make_own(opened)
                opened.whole = True  # it may have been
            except ToolError as error:
                endpoint = Endpoint("", "")
                lost = OpenTransfer(record, endpoint, endpoint)
                self._open[record.id] = lost
                await self._end(lost, error)
                continue
            self._open[record.id] = opened
            self._start(opened)

    async def close(self) -> None:
        """Stop all transfers. Open ones stay so in the record and resume after the next start."""
        self._closing = True
        tasks = {opened.task: opened.settling for opened in self._open.values() if opened.task is not None}
        for task in (*(task for task, settling in tasks.items() if not settling), *self._asking):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)

    # -- nodes ------------------------------------------------------------------------------------------

    def node_joined(self, connection: Connection) -> None:
        if not connection.can_transfer:
            return
        self._arrivals.set()
        self._arrivals = asyncio.Event()
        if "transfers" in connection.queries:
            self._asking.start(self._tidy(connection))

    def node_left(self, connection: Connection) -> None:
        for stream in list(self._streams.values()):
            for party in (stream.sender, stream.receiver):
                if isinstance(party, NodeParty) and party.connection is connection:
                    stream.fail(Interrupted(f"node {connection.node_id!r} disconnected"))

    async def _tidy(self, connection: Connection) -> None:
        """Tell a node to remove its data of transfers that have ended."""
        try:
            answer = await self._queries.ask(connection.node_id, "transfers", None, HELD_SECONDS)
            held = msgspec.json.decode(answer, type=_Held).held
            stored = {record.id for record in await self._database.read(open_transfers)} if held else set()
        except (ToolError, msgspec.MsgspecError, StoreError) as error:
            log.warning("node %s did not report its unfinished transfers: %s", connection.node_id, error)
            return
        for transfer_id in held[:MOST_HELD]:
            if transfer_id not in self._open and transfer_id not in stored and connection.current:
                connection.link.send(encode(TransferStop(transfer_id)))

    def on_message(self, connection: Connection, message: TransferReady | TransferCredit | TransferDone) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        sends = isinstance(stream.sender, NodeParty) and stream.sender.connection is connection
        receives = isinstance(stream.receiver, NodeParty) and stream.receiver.connection is connection
        if sends and receives:  # one node is both ends: the kind of message decides
            sends = isinstance(message, TransferReady) and message.offer is not None
        if sends or receives:
            stream.heard("send" if sends else "receive", message)

    def on_frame(self, connection: Connection, frame: memoryview) -> None:
        try:
            kind, number, offset = read_header(frame)
        except ProtocolError as error:
            log.debug("node %s: ignored a binary frame of %d bytes: %s", connection.node_id, len(frame), error)
            return
        stream = self._streams.get(number)
        if stream is not None and isinstance(stream.sender, NodeParty) and stream.sender.connection is connection:
            stream.relay(kind, offset, frame)

    def redeem(self, ticket: str, address: str) -> Callable[[socket.socket | None], None] | None:
        """Return the function that takes the connection for a ticket; None if the ticket is unknown, used, or comes
        from another address than its node.
        """
        found = self._tickets.get(ticket)
        if found is None or found[2] != address:
            return None
        del self._tickets[ticket]
        splice, role, _ = found
        return splice.expect(role)

    # -- running ----------------------------------------------------------------------------------------

    def _start(self, opened: OpenTransfer) -> None:
        opened.task = asyncio.get_running_loop().create_task(self._run(opened))

    async def _run(self, opened: OpenTransfer) -> None:
        failure: ToolError | None = None
        leaving = False
        try:
            if opened.cancelled is not None:
                raise Cancelled(opened.cancelled)
            async with self._slot(opened):
                await self._move(opened)
        except asyncio.CancelledError:
            if opened.cancelled is None:
                leaving = True
            else:
                failure = Cancelled(opened.cancelled)
        except ToolError as error:
            failure = error
        except Exception as error:
            log.exception("transfer %s failed", opened.record.id)
            failure = Failed(f"{type(error).__name__}: {error}")
        opened.settling = True
        for end in opened.own.values():
            await end.close()
        if leaving:
            return  # it stays open in the record
        if failure is not None:
            failure = await self._truth(opened, failure)
        await self._end(opened, failure)

    @contextlib.asynccontextmanager
    async def _slot(self, opened: OpenTransfer) -> AsyncIterator[None]:
        """Wait for a slot among the active transfers. Nodes and tokens have a limit each, so that a stalled one blocks
        only its own.
        """
        nodes = {end.node_id for end in (opened.source, opened.destination) if end.node_id and not end.in_workspace}
        async with contextlib.AsyncExitStack() as places:
            if Credential(opened.record.credential, frozenset()).is_token:
                await places.enter_async_context(self._token_shares[opened.record.credential])
            for node_id in sorted(nodes):
                await places.enter_async_context(self._shares[node_id])
            await places.enter_async_context(self._slots)
            yield

    async def _truth(self, opened: OpenTransfer, failure: ToolError) -> ToolError | None:
        """Return the error of a stopped or interrupted transfer; None if everything was already in place."""
        reason = opened.cancelled
        placed = await self._placed(opened)
        if placed:
            opened.record = msgspec.structs.replace(opened.record, bytes_done=opened.record.bytes_total or 0)
            return None
        if reason is not None:
            if opened.record.destination == DOWNLOAD:
                return Cancelled(reason)
            return Cancelled(f"{reason}; {AS_IT_WAS if placed is False else NOT_KNOWN}")
        if placed is None:
            message = f"{failure.message}; {NOT_KNOWN}"
            return ToolError.of(failure.kind, message) if failure.kind in _STATES else Failed(f"{UNKNOWN} {message}")
        return failure

    async def _placed(self, opened: OpenTransfer) -> bool | None:
        """Return whether the receiver has put everything in place; None if it cannot be asked."""
        if (own := opened.own.get("receive")) is not None:
            return own.complete
        if not opened.whole:
            return False
        question = {"transfer_id": opened.record.id}
        try:
            answer = await self._queries.ask(opened.destination.node_id, "transfers", question, TRUTH_SECONDS)
            placed = msgspec.json.decode(answer, type=_Placed).placed
        except (ToolError, msgspec.MsgspecError) as error:
            log.warning("transfer %s: its receiver did not report the outcome: %s", opened.record.id, error)
            return None
        return placed

    async def _move(self, opened: OpenTransfer) -> None:
        again = 0
        opened.moved_at = time.monotonic()
        while True:
            try:
                sender, receiver = await self._parties(opened)
                await self._try(opened, sender, receiver)
                return
            except Interrupted as interruption:
                log.info("transfer %s: %s", opened.record.id, interruption)
                if time.monotonic() - opened.moved_at > BROKEN_SECONDS:
                    raise Timeout(
                        f"Transfer timeout: it broke off again and again, and moved nothing for {BROKEN_SECONDS:.0f} s "
                        f"({interruption})"
                    ) from None
            except StartAgain as error:
                again += 1
                if again > STARTS_AGAIN:
                    raise Failed(str(error)) from None
                log.warning("transfer %s restarts: %s", opened.record.id, error)

    async def _parties(self, opened: OpenTransfer) -> tuple[Party, Party]:
        """Wait for both ends and return them. Raises Failed if one stays offline."""
        deadline = time.monotonic() + AWAY_SECONDS
        while True:
            arrivals = self._arrivals
            try:
                return self._party(opened, "send"), self._party(opened, "receive")
            except NotFound as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Failed(f"{error.message}; it did not come back within {AWAY_SECONDS:.0f} s") from None
                await set_within(arrivals, left)

    def _party(self, opened: OpenTransfer, role: Role) -> Party:
        own = opened.own.get(role)
        if own is not None:
            return own
        endpoint = opened.source if role == "send" else opened.destination
        return NodeParty(self._connection("Source" if role == "send" else "Destination", endpoint))

    async def _try(self, opened: OpenTransfer, sender: Party, receiver: Party) -> None:
        record = opened.record
        stream = Stream(next(self._numbers) % 2**32, sender, receiver, partial(self._moved, opened))
        self._streams[stream.number] = stream
        stream.held = record.bytes_done
        for end in opened.own.values():
            end.attach(stream)
        over = False
        splice = self._splice(opened, stream)
        try:
            ticket = self._ticket(splice, "send", sender)
            sender.tell(TransferOpen(stream.number, record.id, "send", opened.source.path, ticket=ticket))
            offer = await self._patiently(stream, stream.offered)
            ends = {"source": record.source, "destination": record.destination}
            if self._reserve is not None:
                await self._reserve(record.id, ends, record.credential, offer.size)
            if offer.folder and self._check_folder is not None:
                await self._check_folder(record.id, ends, record.credential, record.agent_id)
            if "send" not in opened.own:
                offer = msgspec.structs.replace(offer, name=source_name(opened.source.path))
            opened.manifest_bytes = offer.manifest_bytes
            opened.record = msgspec.structs.replace(record, files=offer.files, bytes_total=offer.size, mime=offer.mime)
            ticket = self._ticket(splice, "receive", receiver) if splice and splice.expects("send") else None
            receiver.tell(
                TransferOpen(stream.number, record.id, "receive", opened.destination.path, offer, ticket=ticket)
            )
            accepted = await self._patiently(stream, stream.accepted)
            if not accepted.complete:
                if splice is not None and await splice.start():
                    stream.carried(splice.broke)
                await self._patiently(stream, stream.done)
            opened.record = msgspec.structs.replace(opened.record, bytes_done=offer.size)
            over = True
        except Timeout as error:
            if splice is None or not splice.carrying:
                raise
            splice.broke()
            raise Interrupted(f"{error.message}, on a connection of its own") from None
        finally:
            del self._streams[stream.number]
            opened.whole = opened.whole or stream.whole
            stream.over()
            if splice is not None:
                splice.close()
                for each in splice.tickets.values():
                    self._tickets.pop(each, None)
            if not over:  # another attempt may follow; the end decides what is kept
                for party in (sender, receiver):
                    party.tell(TransferStop(record.id, keep=True))

    def _splice(self, opened: OpenTransfer, stream: Stream) -> SpliceRelay | None:
        """Return a dedicated relay if both ends are nodes that support it."""
        sender, receiver = stream.sender, stream.receiver
        if not CAN_CARRY or not isinstance(sender, NodeParty) or not isinstance(receiver, NodeParty):
            return None
        ends = sender.connection, receiver.connection
        if not all(each.has_files for each in ends) or opened.uncarried == ends:
            return None

        def broke() -> None:
            opened.uncarried = ends
            stream.fail(Interrupted("a connection for its bytes ended"))

        return SpliceRelay(broke)

    def _ticket(self, splice: SpliceRelay | None, role: Role, party: Party) -> str | None:
        if splice is None or not isinstance(party, NodeParty):
            return None
        ticket = splice.tickets[role]
        self._tickets[ticket] = splice, role, party.connection.link.address
        return ticket

    async def _patiently(self, stream: Stream, future: asyncio.Future[Any]) -> Any:
        """Wait for an answer of an end. Raises Timeout if both are silent for too long."""
        while not future.done():
            patience = IDLE_SECONDS + stream.held / REREAD_BYTES
            left = stream.heard_at + patience - time.monotonic()
            if left <= 0:
                raise Timeout(f"Transfer timeout: neither end moved anything for {patience:.0f} s")
            await asyncio.wait({future}, timeout=left)
        return future.result()

    def _moved(self, opened: OpenTransfer, offset: int) -> None:
        done = max(0, offset - opened.manifest_bytes)
        opened.record = msgspec.structs.replace(opened.record, bytes_done=done)
        now = time.monotonic()
        if offset != opened.offset:
            opened.offset, opened.moved_at = offset, now
        if now - opened.noted_at >= PROGRESS_SECONDS:
            opened.noted_at = now
            record, at = opened.record, self._node_registry.clock()
            self._database.write(lambda store: save_transfer(store, record, at), durable=False)

    async def _end(self, opened: OpenTransfer, failure: ToolError | None) -> None:
        now = self._node_registry.clock()
        state = TransferState.OK
        if failure is not None:
            state = _STATES.get(failure.kind, TransferState.ERROR)
        record = msgspec.structs.replace(
            opened.record,
            state=state,
            error_kind=failure.kind.value if failure else None,
            error_message=failure.message.encode(errors="backslashreplace").decode() if failure else None,
            ended_at=now,
        )
        used = {Unit.BYTES: record.bytes_done, Unit.WALL_SECONDS: max(0, now - record.created_at)}

        def write(store: Tx) -> None:
            save_transfer(store, record, now)
            settle(store, f"transfer:{record.id}", used, now)

        try:
            await self._database.write(write)
        except Exception as error:  # in any case, the caller must not wait forever
            log.error("failed to record the end of transfer %s: %s", record.id, error)
        opened.record = record
        del self._open[record.id]
        for role in ("send", "receive"):
            if role not in opened.own:
                endpoint = opened.source if role == "send" else opened.destination
                connection = self._node_registry.connection(endpoint.node_id)
                if connection is not None and connection.can_transfer:
                    connection.link.send(encode(TransferStop(record.id)))
        opened.ended.set_result(record)

    # -- ends -------------------------------------------------------------------------------------------

    def ends(
        self, source: str, destination: str, own: Mapping[Role, OwnEnd] = MappingProxyType({})
    ) -> tuple[Endpoint, Endpoint]:
        """Parse both endpoints of a transfer. Raises InvalidArgs, NotFound."""
        ends = (
            Endpoint("", source) if "send" in own else read_endpoint(source, "Source", self._node_registry),
            Endpoint("", destination)
            if "receive" in own
            else read_endpoint(destination, "Destination", self._node_registry),
        )
        if ends[0].in_workspace and ends[1].in_workspace:
            raise InvalidArgs("Cannot transfer from gsv to gsv; use gsv__ReadFile and gsv__WriteFile")
        return ends

    def _make_own(self, opened: OpenTransfer) -> None:
        roles: tuple[tuple[Role, Endpoint], ...] = (("send", opened.source), ("receive", opened.destination))
        for role, endpoint in roles:
            if endpoint.in_workspace:
                if self._workspace is None:
                    raise Failed("this gateway has no workspace to transfer from or to")
                opened.own[role] = self._workspace(opened.record.agent_id, endpoint.path, role)

    def _connection(self, role: str, endpoint: Endpoint) -> Connection:
        node = self._node_registry.nodes.get(endpoint.node_id)
        connection = node.connection if node else None
        if connection is None:
            seen = f" (offline, last seen {node.seen})" if node else ""
            raise NotFound(f"{role} node not connected: {endpoint.node_id}{seen}")
        if not connection.can_transfer:
            raise Failed(f"node {endpoint.node_id!r} is a plug-in that cannot transfer files")
        return connection


_STATES = {ErrorKind.TIMEOUT: TransferState.TIMEOUT, ErrorKind.CANCELLED: TransferState.CANCELLED}


class _Placed(msgspec.Struct):
    """A receiver's report about an interrupted transfer."""

    placed: bool | None = None


class _Held(msgspec.Struct):
    """The transfers for which a node has data."""

    held: list[str]
