"""The outbox: what was accepted is on disk, and is delivered once the service takes it, in order, and never twice.

A message is written down before its sender hears of it. Each peer has a lane of its own: a message waits for those
before it, and for its service as long as that takes. What was being handed over when the gateway died is handed over
again only where the service can tell a repetition; elsewhere it ends as `unknown`, which is what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import apsw
import msgspec

from farhand.gateway.channel import Attachment, Channel, DeliveryError, Outgoing, Refused, TryLater, Unsure
from farhand.gateway.session_keys import MAIN
from farhand.gateway.session_keys import agent_id as normal_id
from farhand.gateway.splitting import split
from farhand.gateway.workspace import Workspace
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError
from farhand.store import outbox
from farhand.store.database import Database
from farhand.store.outbox import MessageState, OutboxRecord, Place

log = logging.getLogger("farhand.messages")

FIRST_WAIT: Final = 0.5
LONGEST_WAIT: Final = 30.0
GIVE_UP_MS: Final = 3 * 24 * 3600 * 1000
SEND_SECONDS: Final = 120.0
CLOSING_SECONDS: Final = 3.0
MAX_TEXT: Final = 200_000
MAX_MEDIA_BYTES: Final = 25 * 1024 * 1024

Key = tuple[str, str]


class _Lane:
    """What waits for one peer."""

    def __init__(self) -> None:
        self.waiting: deque[OutboxRecord] = deque()
        self.task: asyncio.Task[None] | None = None


class Messages:
    """`start` comes before the first delivery; whoever made it calls `close`."""

    def __init__(self, database: Database, workspace: Workspace, *, clock: Callable[[], int]) -> None:
        self._database = database
        self._workspace = workspace
        self._clock = clock
        self._channels: dict[Key, Channel] = {}
        self._names: dict[str, Key] = {}
        self._lanes: dict[tuple[str, str, str], _Lane] = {}
        self._watched: dict[int, asyncio.Future[OutboxRecord]] = {}
        self._closing = asyncio.Event()

    # -- channels ---------------------------------------------------------------------------------------

    def connect(self, name: str, channel: Channel) -> None:
        """Make a channel known, by its service and account, and by the name of its table. Before `start`."""
        key = (channel.settings.kind, channel.settings.account)
        assert key not in self._channels, f"the channel {key} is connected twice"
        self._channels[key] = channel
        self._names[name] = key

    @property
    def channels(self) -> dict[str, Channel]:
        """By the names of their tables."""
        return {name: self._channels[key] for name, key in self._names.items()}

    def resolve(self, channel: str, account: str | None = None) -> Key:
        """Service and account that a name means. Raises NotFound for one that is not set up."""
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
        """Take a message for delivery; once for each id and peer. Returns when it is on disk.

        `media` are paths of the agent's workspace. Raises InvalidArgs, NotFound for a channel or file that is not
        there, StoreError.
        """
        channel = self._channels.get((place.channel, place.account))
        if channel is None:
            self.resolve(place.channel, place.account)
            raise AssertionError("resolve has told")
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
            self._enqueue(kept)
        return kept

    async def _media_key(self, agent_id: str, path: str) -> str:
        found = await self._workspace.find(agent_id, path)
        if found is None:
            raise NotFound(f"there is no file {path!r} in the workspace to send")
        if found.info.size > MAX_MEDIA_BYTES:
            raise InvalidArgs(f"{path!r} has {found.info.size} bytes; files of up to {MAX_MEDIA_BYTES} bytes are sent")
        return found.info.key

    async def deliver(self, agent_id: str, text: str, *, channel: str | None, to: str | None, key: str) -> str | None:
        """Accept a message for sending, once for each `key`; the place it goes to.

        Without `channel` and `to`: to whoever last talked to the agent; None when nobody has. Raises ToolError.
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
        """Who talked to an agent last."""
        return await self._database.read(lambda store: outbox.last_active(store, agent_id))

    async def outcome(self, record: OutboxRecord, seconds: float) -> OutboxRecord:
        """The message once it has ended, or as it was when that takes longer."""
        found = await self.find(record.seq, record.id)
        if found.ended_at is not None or seconds <= 0:
            return found
        future = self._watched.setdefault(record.seq, asyncio.get_running_loop().create_future())
        found = await self.find(record.seq, record.id)  # it may have ended between the two
        if found.ended_at is not None:
            self._watched.pop(record.seq, None)
            return found
        try:
            return await asyncio.wait_for(asyncio.shield(future), seconds)
        except TimeoutError:
            return await self.find(record.seq, record.id)

    async def find(self, seq: int, message_id: str) -> OutboxRecord:
        """Raises NotFound."""
        for record in await self._database.read(lambda store: outbox.find_messages(store, message_id)):
            if seq in (0, record.seq):
                return record
        raise NotFound(f"there is no message {message_id!r}")

    async def listed(self, limit: int, **filters: Any) -> list[OutboxRecord]:
        return await self._database.read(lambda store: outbox.list_messages(store, limit=limit, **filters))

    async def waiting(self) -> dict[Key, int]:
        """How many messages wait, by channel and account."""
        return await self._database.read(outbox.count_open)

    async def retry(self, message_id: str) -> OutboxRecord:
        """Send a message again that failed, or of which nobody knows. Raises NotFound, InvalidArgs."""
        record = await self.find(0, message_id)
        if not await self._database.write(lambda store: outbox.reopen_message(store, record.seq, self._clock())):
            raise InvalidArgs(
                f"message {message_id!r} is {record.state.value}; only failed and unknown ones can be retried"
            )
        reopened = await self.find(record.seq, message_id)
        self._enqueue(reopened)
        return reopened

    # -- delivering -------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Take up what was open when the gateway stopped; how many messages that is."""
        found = await self._database.read(outbox.open_messages)
        for record in found:
            channel = self._channels.get((record.channel, record.account))
            if channel is None:
                log.warning("a message to %s waits for a channel that is not set up", record.place)
            elif record.state is MessageState.SENDING and not channel.repeatable:
                await self._end(record, MessageState.UNKNOWN, "the gateway stopped while the service was taking it")
            else:
                self._enqueue(record)
        return len(found)

    async def close(self) -> None:
        """Let deliveries that are under way finish for a moment; the rest is taken up after the next start."""
        self._closing.set()
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _enqueue(self, record: OutboxRecord) -> None:
        lane = self._lanes.setdefault(record.place.lane, _Lane())
        lane.waiting.append(record)
        if lane.task is None and not self._closing.is_set():
            lane.task = asyncio.get_running_loop().create_task(self._serve(record.place.lane, lane))

    async def _serve(self, key: tuple[str, str, str], lane: _Lane) -> None:
        channel = self._channels[key[:2]]
        while lane.waiting and not self._closing.is_set():
            record = lane.waiting[0]
            try:
                if await self._wait_for_turn(record):
                    return
                record = await self._attempt(channel, record)
            except Exception:  # the store does not answer: the message is on disk as it was
                log.exception("message %s to %s could not be written down", record.id, record.place)
                await self._pause(LONGEST_WAIT)
                continue
            if record.ended_at is None:
                lane.waiting[0] = record
            else:
                lane.waiting.popleft()
        if not lane.waiting:
            del self._lanes[key]

    async def _wait_for_turn(self, record: OutboxRecord) -> bool:
        """True when the gateway stops before."""
        return await self._pause((record.next_at - self._clock()) / 1000)

    async def _pause(self, seconds: float) -> bool:
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    async def _attempt(self, channel: Channel, record: OutboxRecord) -> OutboxRecord:
        """Try once, part by part; the message as it is afterwards."""
        record = await self._save(
            msgspec.structs.replace(record, state=MessageState.SENDING, attempts=record.attempts + 1)
        )
        try:
            steps = _steps(channel, record)
            while record.parts_sent < steps:
                part = await self._part(channel, record)
                async with asyncio.timeout(SEND_SECONDS):
                    remote_id = await channel.send(part)
                record = msgspec.structs.replace(record, parts_sent=record.parts_sent + 1, remote_id=remote_id)
                if record.parts_sent < steps:
                    record = await self._save(record)
            return await self._end(record, MessageState.SENT, None)
        except Refused as error:
            return await self._end(record, MessageState.FAILED, str(error))
        except ToolError as error:  # a file to be sent is gone
            return await self._end(record, MessageState.FAILED, error.message)
        except TryLater as error:
            return await self._later(record, str(error), error.after)
        except TimeoutError:
            return await self._doubtful(channel, record, f"no answer within {SEND_SECONDS:g} s")
        except (Unsure, DeliveryError) as error:
            return await self._doubtful(channel, record, str(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("channel %s failed with message %s", channel.settings.kind, record.id)
            return await self._doubtful(channel, record, f"{type(error).__name__}: {error}")

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

    async def _doubtful(self, channel: Channel, record: OutboxRecord, reason: str) -> OutboxRecord:
        if channel.repeatable:
            return await self._later(record, reason, None)
        return await self._end(record, MessageState.UNKNOWN, f"it may have been delivered or not: {reason}")

    async def _later(self, record: OutboxRecord, reason: str, after: float | None) -> OutboxRecord:
        now = self._clock()
        if now - record.created_at > GIVE_UP_MS:
            return await self._end(record, MessageState.FAILED, f"not taken for three days: {reason}")
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(record.attempts - 1, 10)) * random.uniform(0.8, 1.2)  # noqa: S311
        waited = max(wait, after or 0.0)
        return await self._save(
            msgspec.structs.replace(
                record, state=MessageState.WAITING, next_at=now + int(waited * 1000), error=reason[:1000]
            )
        )

    async def _end(self, record: OutboxRecord, state: MessageState, error: str | None) -> OutboxRecord:
        ended = msgspec.structs.replace(
            record, state=state, error=error[:1000] if error else None, ended_at=self._clock()
        )
        if error:
            log.warning("message %s to %s: %s (%s)", record.id, record.place, state.value, error[:300])
        await self._save(ended)
        future = self._watched.pop(record.seq, None)
        if future is not None and not future.done():
            future.set_result(ended)
        return ended

    async def _save(self, record: OutboxRecord) -> OutboxRecord:
        def write(store: apsw.Connection) -> None:
            outbox.save_message(store, record, self._clock())

        await self._database.write(write, at_once=True)
        return record


def _steps(channel: Channel, record: OutboxRecord) -> int:
    """How many messages of the service one of ours is."""
    return len(record.parts) + (len(record.media) if channel.files_apart else 0)


def sent(record: OutboxRecord) -> dict[str, Any]:
    """What a caller is told of a message. Raises Failed when the service refused it or nobody can tell."""
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
        answer["note"] = f"accepted; it is delivered as soon as the service takes it{reason}. Do not send it again."
    return answer
