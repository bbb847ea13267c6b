"""Deliver messages from disk: in order per peer, at most once, whenever the service accepts them.

A message is stored before its sender gets a response. Each peer has its own queue, in which a message waits for the
earlier ones and, as long as necessary, for its service. If several gateways share a store, the one that claims a
message sends it and renews its lease meanwhile. If a gateway dies during delivery, the message is sent again only if
the service can detect repetitions; otherwise it ends as `unknown`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from farhand.gateway.leases import LeaseWatch
from farhand.gateway.messaging.channel import (
    Attachment,
    Channel,
    DeliveryError,
    Outgoing,
    TryLater,
    Undeliverable,
    Unsure,
)
from farhand.gateway.messaging.splitting import split
from farhand.gateway.repeating import Repeating, set_within
from farhand.gateway.sessions.keys import MAIN
from farhand.gateway.sessions.keys import agent_id as normal_id
from farhand.gateway.workspace.workspace import Workspace
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError
from farhand.store.ports import Store, StoreError
from farhand.store.tables import outbox
from farhand.store.tables.outbox import MessageState, OutboxRecord, Place

log = logging.getLogger(__name__)

FIRST_WAIT: Final = 0.5
LONGEST_WAIT: Final = 30.0
GIVE_UP_MS: Final = 3 * 24 * 3600 * 1000
SEND_SECONDS: Final = 120.0
# A gateway that has not renewed its lease for this long is considered dead.
LEASE_SECONDS: Final = 20.0
# How often to check for messages that other gateways accepted and sent.
POLL_SECONDS: Final = 5.0
CLOSING_SECONDS: Final = 3.0
WRITE_AGAIN_SECONDS: Final = 2.0
MAX_TEXT: Final = 200_000
MAX_MEDIA_BYTES: Final = 25 * 1024 * 1024

Key = tuple[str, str]
QueueKey = tuple[str, str, str]


class _PeerQueue:
    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Messages:
    """Accept and deliver messages. Call `start` before the first delivery; the owner calls `close`."""

    def __init__(
        self,
        database: Store,
        workspace: Workspace,
        *,
        clock: Callable[[], int],
        alone: bool = False,
        lease_seconds: float = LEASE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        hide: Callable[[str], str] = str,
    ) -> None:
        """Create the outbox.

        `alone`: no other gateway uses this store, so messages in delivery before `start` have lost their sender. `hide`
        removes the gateway's secrets from what is sent.
        """
        self._hide = hide
        self._database = database
        self._workspace = workspace
        self._clock = clock
        self._alone = alone
        self._poll = poll_seconds
        self._holder = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._channels: dict[Key, Channel] = {}
        self._names: dict[str, Key] = {}
        self._queues: dict[QueueKey, _PeerQueue] = {}
        self._watched: dict[int, asyncio.Future[OutboxRecord]] = {}
        # Of the messages that other gateways send.
        self._leases = LeaseWatch[int](lease_seconds)
        self._look_seconds = min(poll_seconds, lease_seconds / 4)
        self._watching = Repeating(self._look_around, "outbox", retry_seconds=self._look_seconds)
        self._closing = asyncio.Event()

    # -- channels ---------------------------------------------------------------------------------------

    def connect(self, name: str, channel: Channel) -> None:
        """Register a channel by service and account, and by table name. Call before `start`."""
        key = (channel.settings.kind, channel.settings.account)
        assert key not in self._channels, f"the channel {key} is connected twice"
        self._channels[key] = channel
        self._names[name] = key

    @property
    def channels(self) -> dict[str, Channel]:
        """Return the channels by table name."""
        return {name: self._channels[key] for name, key in self._names.items()}

    def channel_of(self, place: Place) -> Channel | None:
        return self._channels.get((place.channel, place.account))

    def resolve(self, channel: str, account: str | None = None) -> Key:
        """Return the service and account that a name refers to. Raises NotFound if it is not set up."""
        wanted = channel.strip().lower()
        if account is None:
            if wanted in self._names:
                return self._names[wanted]
            accounts = sorted(one for kind, one in self._channels if kind == wanted)
            chosen = accounts[0] if len(accounts) == 1 else "default"
        else:
            chosen = normal_id(account, "default")
        if (wanted, chosen) not in self._channels:
            known = ", ".join(sorted(self._names)) or "none"
            raise NotFound(
                f'Channel "{channel}" (account: {chosen}) is not connected. '
                f"Channels here: {known}; add one to farhand.toml as [channels.{wanted or 'NAME'}]"
            )
        return wanted, chosen

    # -- accepting --------------------------------------------------------------------------------------

    async def accept(
        self,
        place: Place,
        text: str,
        *,
        message_id: str,
        origin: str,
        agent_id: str = MAIN,
        reply_to: str | None = None,
        media: Sequence[str] = (),
    ) -> OutboxRecord:
        """Accept a message for delivery, once for each id and peer; return when it is on disk.

        `media` are paths in the agent's workspace. Raises InvalidArgs, NotFound if a channel or file does not exist,
        StoreError.
        """
        channel = self.channel_of(place)
        if channel is None:
            self.resolve(place.channel, place.account)
            raise AssertionError("resolve raises for an unknown channel")
        text = self._hide(text)
        if not text.strip() and not media:
            raise InvalidArgs("text is required")
        if len(text) > MAX_TEXT:
            raise InvalidArgs(f"a message has at most {MAX_TEXT} characters, this one has {len(text)}; send a file")
        if not place.peer.strip():
            raise InvalidArgs("to (peer ID) is required (no current peer context available)")
        keys = [await self._media_key(agent_id, path) for path in media]
        now = self._clock()
        record = OutboxRecord(
            id=message_id,
            channel=place.channel,
            account=place.account,
            peer=place.peer,
            peer_kind=place.peer_kind,
            parts=split(text, channel.longest_text) if text.strip() or not channel.files_apart else (),
            media=tuple(keys),
            reply_to=reply_to,
            agent_id=agent_id,
            origin=origin,
            created_at=now,
        )
        kept, new = await self._database.write(lambda store: outbox.add_message(store, record))
        if new:
            self._serve_queue(kept.place.queue)
        return kept

    async def _media_key(self, agent_id: str, path: str) -> str:
        found = await self._workspace.find(agent_id, path)
        if found is None:
            raise NotFound(f"there is no file {path!r} in the workspace to send")
        if found.info.size > MAX_MEDIA_BYTES:
            raise InvalidArgs(f"{path!r} has {found.info.size} bytes; files of up to {MAX_MEDIA_BYTES} bytes are sent")
        return found.info.key

    async def deliver(self, agent_id: str, text: str, *, channel: str | None, to: str | None, key: str) -> str | None:
        """Accept a message for sending, once for each `key`; return its destination.

        Without `channel` and `to`, it goes to the person who last talked to the agent; returns None if there is none.
        Raises ToolError.
        """
        last = await self.last_active(agent_id)
        kind, account = self.resolve(channel) if channel else (None, None)
        if last is None or (kind is not None and (last.channel, last.account) != (kind, account)):
            if channel is None and to is None:
                return None
            if kind is None or account is None:
                raise InvalidArgs("channel is required (no current channel context available)")
            if to is None:
                raise InvalidArgs("to (peer ID) is required (no current peer context available)")
            place = Place(kind, account, to)
        elif to is None or to == last.peer:
            place = last
        else:
            place = Place(last.channel, last.account, to)
        kept = await self.accept(place, text, message_id=key, origin=key.partition(":")[0], agent_id=agent_id)
        return str(kept.place)

    async def last_active(self, agent_id: str) -> Place | None:
        return await self._database.read(lambda store: outbox.last_active(store, agent_id))

    async def outcome(self, record: OutboxRecord, seconds: float) -> OutboxRecord:
        """Wait for a message to reach its final state; after `seconds`, return it as it is."""
        found = await self.find(record.seq, record.id)
        if found.ended_at is not None or seconds <= 0:
            return found
        future = self._watched.setdefault(record.seq, asyncio.get_running_loop().create_future())
        found = await self.find(record.seq, record.id)  # it may have ended in between
        if found.ended_at is not None:
            self._watched.pop(record.seq, None)
            return found
        try:
            return await asyncio.wait_for(asyncio.shield(future), seconds)
        except TimeoutError:
            return await self.find(record.seq, record.id)

    async def find(self, seq: int, message_id: str) -> OutboxRecord:
        """Return a message. Raises NotFound."""
        for record in await self._database.read(lambda store: outbox.find_messages(store, message_id)):
            if seq in (0, record.seq):
                return record
        raise NotFound(f"there is no message {message_id!r}")

    async def listed(self, limit: int, **filters: Any) -> list[OutboxRecord]:
        return await self._database.read(lambda store: outbox.list_messages(store, limit=limit, **filters))

    async def waiting(self) -> dict[Key, int]:
        """Return how many messages are waiting, by channel and account."""
        return await self._database.read(outbox.count_open)

    async def retry(self, message_id: str) -> OutboxRecord:
        """Send a message again that failed or whose outcome is unknown. Raises NotFound, InvalidArgs."""
        record = await self.find(0, message_id)
        now = self._clock()
        if not await self._database.write(lambda store: outbox.reopen_message(store, record.seq, now)):
            raise InvalidArgs(
                f"message {message_id!r} is {record.state.value}; only failed and unknown ones can be retried"
            )
        self._serve_queue(record.place.queue)
        return await self.find(record.seq, message_id)

    # -- delivering -------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Resume the messages that were open when the gateway stopped; return how many."""
        found = await self._database.read(outbox.open_messages)
        for record in found:
            if (record.channel, record.account) not in self._channels:
                log.warning("a message to %s is waiting for a channel that is not set up", record.place)
                continue
            if record.state is MessageState.SENDING and self._alone:
                await self._take_from(record, "the gateway stopped while the service was taking it")
            self._serve_queue(record.place.queue)
        if not self._alone:
            self._watching.start()
        return len(found)

    async def close(self) -> None:
        """Give current deliveries a moment to finish; the rest resume at the next start."""
        self._closing.set()
        for queue in self._queues.values():
            queue.changed.set()
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING_SECONDS)
        await self._watching.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _serve_queue(self, key: QueueKey) -> None:
        """Start or wake the sender of a peer's queue."""
        if self._closing.is_set() or key[:2] not in self._channels:
            return
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _PeerQueue()
            queue.task = asyncio.get_running_loop().create_task(self._serve(key, queue))
        queue.changed.set()

    async def _serve(self, key: QueueKey, queue: _PeerQueue) -> None:
        channel = self._channels[key[:2]]
        while not self._closing.is_set():
            queue.changed.clear()
            try:
                record, ours = await self._database.write(
                    partial(outbox.claim_next, queue=key, holder=self._holder, now=self._clock())
                )
                if ours and record is not None:
                    await self._attempt(channel, record)
                    continue
            except Exception:  # the store is unavailable: the message on disk is unchanged
                log.exception("messages to %s are waiting for the store", key[2])
                await set_within(queue.changed, LONGEST_WAIT)
                continue
            if record is not None:
                others = record.state is MessageState.SENDING
                await set_within(queue.changed, self._poll if others else (record.next_at - self._clock()) / 1000)
            elif not queue.changed.is_set():
                del self._queues[key]
                return

    async def _attempt(self, channel: Channel, record: OutboxRecord) -> None:
        """Try once to send a message claimed by this gateway, part by part."""
        try:
            steps = _steps(channel, record)
            while record.parts_sent < steps:
                part = await self._part(channel, record)
                async with asyncio.timeout(SEND_SECONDS):
                    remote_id = await channel.send(part)
                record = msgspec.structs.replace(record, parts_sent=record.parts_sent + 1, remote_id=remote_id)
                if record.parts_sent < steps and not await self._save(record):
                    return  # our lease expired: another gateway sends the rest
            await self._end(record, MessageState.SENT, None)
        except Undeliverable as error:
            await self._end(record, MessageState.FAILED, str(error))
        except ToolError as error:  # an attached file no longer exists
            await self._end(record, MessageState.FAILED, error.message)
        except TryLater as error:
            await self._later(record, str(error), error.after)
        except TimeoutError:
            await self._doubtful(channel, record, f"no answer within {SEND_SECONDS:g} s")
        except (Unsure, DeliveryError) as error:
            await self._doubtful(channel, record, str(error))
        except Exception as error:
            log.exception("channel %s failed to send message %s", channel.settings.kind, record.id)
            await self._doubtful(channel, record, f"{type(error).__name__}: {error}")

    async def _part(self, channel: Channel, record: OutboxRecord) -> Outgoing:
        number = record.parts_sent
        texts = len(record.parts)
        keys: Sequence[str] = ()
        if channel.files_apart:
            keys = record.media[number - texts :][:1] if number >= texts else ()
        elif number == texts - 1:
            keys = record.media
        files = [await self._attachment(key) for key in keys]
        return Outgoing(
            id=record.id if _steps(channel, record) == 1 else f"{record.id}/{number + 1}",
            place=record.place,
            text=record.parts[number] if number < texts else "",
            reply_to=record.reply_to if number == 0 else None,
            attachments=tuple(files),
        )

    async def _attachment(self, key: str) -> Attachment:
        info, data = await self._workspace.objects.get(key)
        return Attachment(key.rpartition("/")[2], info.content_type or "application/octet-stream", data)

    async def _doubtful(self, channel: Channel, record: OutboxRecord, reason: str) -> None:
        if channel.repeatable:
            await self._later(record, reason, None)
        else:
            await self._end(record, MessageState.UNKNOWN, f"it may have been delivered or not: {reason}")

    async def _later(self, record: OutboxRecord, reason: str, after: float | None) -> None:
        now = self._clock()
        if now - record.created_at > GIVE_UP_MS:
            await self._end(record, MessageState.FAILED, f"not accepted for three days: {reason}")
            return
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(record.attempts - 1, 10)) * random.uniform(0.8, 1.2)  # noqa: S311
        waited = max(wait, after or 0.0)
        await self._save(
            msgspec.structs.replace(
                record, state=MessageState.WAITING, next_at=now + int(waited * 1000), error=reason[:1000]
            )
        )

    async def _end(self, record: OutboxRecord, state: MessageState, error: str | None) -> None:
        ended = msgspec.structs.replace(
            record, state=state, error=error[:1000] if error else None, ended_at=self._clock()
        )
        if error:
            log.warning("message %s to %s: %s (%s)", record.id, record.place, state.value, error[:300])
        if await self._save(ended):
            self._tell_watchers(ended)

    async def _save(self, record: OutboxRecord) -> bool:
        """Store the progress of a message, retrying as long as the store fails, so that nothing is sent twice.

        Returns False if another gateway has claimed the message.
        """
        while True:
            try:
                return await self._database.write(partial(outbox.save_message, record=record, now=self._clock()))
            except StoreError as error:
                if self._closing.is_set():
                    raise
                log.error("message %s is %s, but storing that failed: %s", record.id, record.state.value, error)
                await set_within(self._closing, WRITE_AGAIN_SECONDS)

    def _tell_watchers(self, ended: OutboxRecord) -> None:
        future = self._watched.pop(ended.seq, None)
        if future is not None and not future.done():
            future.set_result(ended)

    # -- other gateways ---------------------------------------------------------------------------------

    async def _look_around(self) -> float:
        """Renew this gateway's lease, and check messages that others accepted, sent, or left when they died."""
        if self._queues:
            await self._database.write(partial(outbox.beat, holder=self._holder), durable=False)
        opened = await self._database.read(outbox.open_messages)
        others = {
            record.seq: record
            for record in opened
            if record.state is MessageState.SENDING and record.holder != self._holder
        }
        for seq in self._leases.expired({seq: record.beat for seq, record in others.items()}):
            await self._take_from(others[seq], "the gateway that sent it vanished while the service was taking it")
        for record in opened:
            self._serve_queue(record.place.queue)
        for seq in list(self._watched):
            known = await self._database.read(partial(outbox.find_message, seq=seq))
            if known is not None and known.ended_at is not None:
                self._tell_watchers(known)
        return self._look_seconds

    async def _take_from(self, record: OutboxRecord, reason: str) -> None:
        """Decide what to do with a message whose sender is dead."""
        channel = self.channel_of(record.place)
        if channel is None:
            return
        repeat, now = channel.repeatable, self._clock()
        if await self._database.write(lambda store: outbox.take_from(store, record, repeat, reason, now)):
            log.warning("message %s to %s: %s", record.id, record.place, reason)


def _steps(channel: Channel, record: OutboxRecord) -> int:
    """Return how many service messages one outbox message needs."""
    return len(record.parts) + (len(record.media) if channel.files_apart else 0)


def sent(record: OutboxRecord) -> dict[str, Any]:
    """Return what a caller sees of a message. Raises Failed if the service refused it or its outcome is unknown."""
    if record.state is MessageState.FAILED:
        raise Failed(f"Channel send failed: {record.error}")
    if record.state is MessageState.UNKNOWN:
        raise Failed(f"outcome unknown: {record.error}; `farhand message retry {record.id}` sends it again")
    answer: dict[str, Any] = {
        "sent": record.state is MessageState.SENT,
        "channel": record.channel,
        "to": record.peer,
        "peerKind": record.peer_kind,
        "accountId": record.account,
        "messageId": record.remote_id or record.id,
        "id": record.id,
    }
    if record.state is not MessageState.SENT:
        answer["queued"] = True
        reason = f" ({record.error})" if record.error else ""
        answer["note"] = f"accepted; it is delivered as soon as the service accepts it{reason}. Do not send it again."
    return answer
