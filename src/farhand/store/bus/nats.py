"""The bus of several gateways: core NATS. Needs the extra `farhand[fleet]`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscriber

from farhand.protocol.errors import FarhandError
from farhand.store.ports import Handler, NoResponder, ReplyUnknown

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 5.0
RECONNECT_SECONDS: Final = 0.3
# How often the server is asked whether it is there, and how long its answer may take.
LOOK_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 3
# Asks go to one subscriber of this group; published messages go to every subscriber.
GROUP: Final = "ask"
# The header of a reply that is not one: the handler failed.
FAILED: Final = "Farhand-Failed"
# Messages and subscriptions that wait to be sent. A message beyond that is dropped, as one is when the server is away.
MOST_WAITING: Final = 100_000


class NatsUnavailable(FarhandError):
    """The server cannot be reached, or refuses the connection."""


def shown_address(url: str) -> str:
    """Return a URL without its user, password or token."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


async def _connected(url: str) -> Client:
    """Return a connected client. Raises NatsUnavailable, without a password in its text."""
    lost: list[Exception] = []

    async def failed(error: Exception) -> None:
        lost.append(error)

    try:
        return await asyncio.wait_for(
            nats.connect(
                url,
                name="farhand",
                connect_timeout=CONNECT_SECONDS,
                allow_reconnect=False,
                max_reconnect_attempts=-1,
                error_cb=failed,
            ),
            CONNECT_SECONDS,
        )
    except TimeoutError:
        reason = str(lost[-1]) if lost else f"no answer within {CONNECT_SECONDS:g} s"
        raise NatsUnavailable(f"cannot reach the bus {shown_address(url)}: {reason}") from None
    except Exception as error:  # the client raises whatever the socket or the URL raised
        reason = str(lost[-1] if lost else error) or type(error).__name__
        raise NatsUnavailable(f"cannot reach the bus {shown_address(url)}: {reason}") from None


async def _closed(client: Client) -> None:
    """Close a client whose server may not answer any more."""
    with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
        async with asyncio.timeout(ANSWER_SECONDS):
            await client.close()


class NatsSubscription:
    """A subscription that is made, and ended, in the order of the calls."""

    def __init__(self, bus: NatsBus, subject: str, handler: Handler) -> None:
        self._bus = bus
        self._handler = handler
        self._subject = subject
        self._subscribers: list[NatsSubscriber] = []
        # The client it was made with.
        self._client: Client | None = None
        self._closed = False

    async def open(self) -> None:
        """Subscribe with the current client; again after it was replaced."""
        client = self._bus.client
        if not self._closed and self._client is not client:
            self._client, self._subscribers = client, []
            for subject, queue in ((f"{self._subject}.ask", GROUP), (f"{self._subject}.all", "")):
                self._subscribers.append(await client.subscribe(subject, queue, self._heard))

    async def _heard(self, message: Msg) -> None:
        # Handled in a task: the client delivers the next message of a subject only after this returns.
        if message.reply:
            self._bus.start(self._bus.answer(message, self._handler))
        else:
            await self._bus.deliver(message, self._handler)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._bus.forget(self)
            self._bus.later(self._end)

    async def _end(self) -> None:
        for subscriber in self._subscribers:
            await subscriber.unsubscribe()


class NatsBus:
    """Messages through a NATS server. Open it with `NatsBus.open`; the caller closes it."""

    def __init__(self, client: Client, url: str) -> None:
        self.client = client
        self.url = url
        self._tasks: set[asyncio.Task[None]] = set()
        # Subscriptions and messages that are sent one after the other.
        self._orders: asyncio.Queue[Any] = asyncio.Queue(MOST_WAITING)
        self._subscriptions: list[NatsSubscription] = []
        self._sender: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: str) -> NatsBus:
        """Connect. Raises NatsUnavailable, without a password in its text."""
        bus = cls(await _connected(url), url)
        loop = asyncio.get_running_loop()
        bus._sender, bus._keeper = loop.create_task(bus._send_orders()), loop.create_task(bus._keep_connected())
        return bus

    async def _keep_connected(self) -> None:
        """Notice when the server does not answer, and connect again: with a new client, which has no old state."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.client.flush(timeout=ANSWER_SECONDS)
                continue
            except (nats.errors.Error, TimeoutError, OSError) as error:
                reason = type(error).__name__
            log.error(
                "the bus %s is not available (%s); reconnecting",
                shown_address(self.url),
                reason,
            )
            await _closed(self.client)
            while True:
                try:
                    self.client = await _connected(self.url)
                    for subscription in list(self._subscriptions):
                        await subscription.open()
                    await self.client.flush(timeout=ANSWER_SECONDS)
                    break
                except (NatsUnavailable, nats.errors.Error, TimeoutError, OSError) as error:
                    log.debug("%s", error)
                    await _closed(self.client)
                    await asyncio.sleep(RECONNECT_SECONDS)
            log.info("the bus %s is available again", shown_address(self.url))

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    async def ask(self, subject: str, body: bytes, seconds: float) -> bytes:
        if not self.connected:
            raise NoResponder(f"the bus is not available: the request to {subject!r} was not delivered")
        await self._orders_sent()
        try:
            reply = await self.client.request(f"{subject}.ask", body, timeout=seconds)
        except nats.errors.NoRespondersError:
            raise NoResponder(f"no subscriber for {subject!r}: the request was not delivered") from None
        except nats.errors.MaxPayloadError:
            raise NoResponder(f"the request to {subject!r} has {len(body)} bytes, more than the bus accepts") from None
        except (nats.errors.Error, TimeoutError, OSError) as error:
            why = f"within {seconds:g} s" if isinstance(error, TimeoutError) else f"({type(error).__name__})"
            raise ReplyUnknown(f"no reply to {subject!r} {why}") from None
        if reply.headers and FAILED in reply.headers:
            raise ReplyUnknown(f"the handler of {subject!r} failed: {reply.headers[FAILED]}")
        return bytes(reply.data)

    def publish(self, subject: str, body: bytes) -> None:
        try:
            self._orders.put_nowait(lambda: self.client.publish(f"{subject}.all", body))
        except asyncio.QueueFull:
            log.error("the bus %s is too slow: a message to %s was dropped", shown_address(self.url), subject)

    def serve(self, subject: str, handler: Handler) -> NatsSubscription:
        subscription = NatsSubscription(self, subject, handler)
        self._subscriptions.append(subscription)
        self.later(subscription.open)
        return subscription

    async def close(self) -> None:
        if self._sender is not None:
            if self.connected:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await self._orders_sent()
            self._sender.cancel()
        for task in (*self._tasks, *filter(None, [self._keeper])):
            task.cancel()
        await _closed(self.client)

    def forget(self, subscription: NatsSubscription) -> None:
        """Do not subscribe again after the connection is lost."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    # -- for subscriptions ------------------------------------------------------------------------------

    def later(self, order: Any) -> None:
        self._orders.put_nowait(order)

    def start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def answer(self, message: Msg, handler: Handler) -> None:
        try:
            body, headers = await handler(message.data), None
        except Exception as error:
            log.exception("the handler of %s failed", message.subject)
            body, headers = b"", {FAILED: type(error).__name__}
        try:
            await self.client.publish(message.reply, body, headers=headers)
        except (nats.errors.Error, OSError) as error:  # the asker finds out by its time limit
            log.warning("failed to answer a request to %s: %s", message.subject, type(error).__name__)

    @staticmethod
    async def deliver(message: Msg, handler: Handler) -> None:
        try:
            await handler(message.data)
        except Exception:  # a failing subscriber must not stop the others
            log.exception("the handler of %s failed", message.subject)

    # -- orders -----------------------------------------------------------------------------------------

    async def _orders_sent(self) -> None:
        """Wait until everything that was served or published before this call is on its way."""
        if not self._orders.empty() and self._sender is not None and not self._sender.done():
            await self._orders.join()

    async def _send_orders(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                await order()
                if self._orders.empty():
                    await self.client.flush(timeout=2)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.debug("failed to send to the bus: %s", type(error).__name__)
            finally:
                self._orders.task_done()
