"""The contract of channels: those of Farhand, and the one that `examples/plugin_package` adds by entry point.

Each channel talks over real sockets to a server that behaves as its chat service does; e-mail to a real mail server.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from farhand.app.plugins import CHANNELS, Plugins, installed
from farhand.channels.registry import CONSOLE, make_channels
from farhand.gateway.messaging.channel import (
    Attachment,
    Channel,
    ChannelSettings,
    DeliveryError,
    Incoming,
    Outgoing,
    TryLater,
    Undeliverable,
    Unsure,
)
from farhand.protocol.errors import Failed
from tests.integration.test_plugins import install
from tests.support import mail_server
from tests.support.channel_doubles import (
    FILE,
    ChannelDouble,
    ConsoleDouble,
    DiscordDouble,
    EmailDouble,
    NotebookDouble,
    SignalDouble,
    TelegramDouble,
    WebhookDouble,
    WhatsAppDouble,
)
from tests.support.harness import wait_until

SECONDS = 60.0
DOUBLES: dict[str, Callable[[Path], ChannelDouble]] = {
    "telegram": lambda _: TelegramDouble(),
    "discord": lambda _: DiscordDouble(),
    "signal": lambda _: SignalDouble(),
    "whatsapp": lambda _: WhatsAppDouble(),
    "webhook": lambda _: WebhookDouble(),
    "email": lambda _: EmailDouble(),
    "console": lambda _: ConsoleDouble(),
    "notebook": NotebookDouble,
}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugins]:
    """The entry points of Farhand and of the example package, which is installed for this module."""
    site = tmp_path_factory.mktemp("site")
    install(site)
    sys.path.insert(0, str(site))
    yield Plugins(installed())
    sys.path.remove(str(site))
    for name in [name for name in sys.modules if name.partition(".")[0] == "farhand_example"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def mail() -> Iterator[mail_server.MailServer]:
    with mail_server.MailServer() as running:
        yield running


@pytest.fixture(params=DOUBLES)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChannelDouble]:
    if request.param == "email":
        if reason := mail_server.missing():
            pytest.skip(reason)
        EmailDouble.server = request.getfixturevalue("mail")
    with DOUBLES[request.param](tmp_path) as double:
        yield double


def make(service: ChannelDouble, plugins: Plugins) -> Channel:
    tables = {} if service.kind == CONSOLE else {service.kind: service.settings()}
    return make_channels(tables, {}, plugins.loaders(CHANNELS))[service.kind]


@contextlib.asynccontextmanager
async def opened(service: ChannelDouble, plugins: Plugins) -> AsyncIterator[Channel]:
    channel = make(service, plugins)
    try:
        yield channel
    finally:
        await channel.close()


class Inbox:
    """What a channel handed over. It rejects the first `failures` messages as a full disk would."""

    def __init__(self, failures: int = 0) -> None:
        self.got: list[Incoming] = []
        self.rejected: list[Incoming] = []
        self._failures = failures

    async def take(self, message: Incoming) -> None:
        if len(self.rejected) < self._failures:
            self.rejected.append(message)
            raise Failed("the disk is full")
        self.got.append(message)

    async def wait(self, count: int) -> list[Incoming]:
        await until(lambda: len(self.got) >= count)
        return self.got


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not met():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(channel: Channel, inbox: Inbox) -> AsyncIterator[None]:
    """Run the channel; it must not end by itself, and must end when it is cancelled."""
    running = asyncio.create_task(channel.run(inbox.take))
    try:
        yield
        assert not running.done(), running
    finally:
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=SECONDS)
        assert done and running.cancelled(), running


def outgoing(
    service: ChannelDouble, text: str, number: int = 1, *files: Attachment, peer: str | None = None
) -> Outgoing:
    return Outgoing(id=f"m-{number}", place=service.place(peer), text=text, attachments=files)


def delivered(service: ChannelDouble, count: int) -> list[tuple[str, str, list[bytes]]]:
    """Return what arrived, without an order: the outbox sends one message after the other."""
    return sorted(wait_until(lambda: len(found := service.sent()) >= count and found, SECONDS))


def only_if(supported: object) -> None:
    """End a test of something that the service cannot do."""
    if not supported:
        pytest.skip("not a part of this service")


# -- kinds ----------------------------------------------------------------------------------------------------------


def test_every_channel_is_held_to_this_contract(plugins: Plugins) -> None:
    assert set(plugins.loaders(CHANNELS)) | {CONSOLE} == set(DOUBLES)


def test_a_channel_describes_itself(service: ChannelDouble, plugins: Plugins) -> None:
    async def main() -> None:
        async with opened(service, plugins) as channel:
            assert isinstance(channel.settings, ChannelSettings) and channel.settings.kind == service.kind
            assert channel.longest_text >= 100 and channel.trouble == ""
            assert {type(channel.repeatable), type(channel.files_apart)} == {bool}

    asyncio.run(main())


# -- receiving ------------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.receives)

    async def main() -> None:
        async with opened(service, plugins) as channel:
            inbox = Inbox()
            async with listening(channel, inbox):
                for count, text in enumerate(("one", "zwei: größer als 🙂", "three\nlines\nhere"), 1):
                    await service.write(channel, text)
                    await inbox.wait(count)
                await service.write(channel, "see", FILE)
                await inbox.wait(4)
            texts = [one.text for one in inbox.got]
            assert texts == ["one", "zwei: größer als 🙂", "three\nlines\nhere", "see"]
            assert len({one.id for one in inbox.got}) == 4 and all(one.id for one in inbox.got)
            assert {one.peer for one in inbox.got} == {one.sender for one in inbox.got} == {service.peer}
            assert {one.peer_kind for one in inbox.got} == {"dm"}
            last = inbox.got[3]
            (file,) = last.attachments if last.fetch is None else await last.fetch()
            assert (file.name, file.data) == (FILE[0], FILE[2]) and "/" in file.content_type

    asyncio.run(main())


def test_a_message_that_could_not_be_stored_is_repeated_before_the_next(
    service: ChannelDouble, plugins: Plugins
) -> None:
    only_if(service.receives)

    async def main() -> None:
        async with opened(service, plugins) as channel:
            inbox = Inbox(failures=1)
            async with listening(channel, inbox):
                await service.write(channel, "first")
                await service.write(channel, "second")
                got = await inbox.wait(2)
            assert [one.text for one in got] == ["first", "second"]
            assert (inbox.rejected[0].id, inbox.rejected[0].text) == (got[0].id, got[0].text)

    asyncio.run(main())


def test_an_invalid_message_is_skipped(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.receives and service.noisy)

    async def main() -> None:
        async with opened(service, plugins) as channel:
            inbox = Inbox()
            async with listening(channel, inbox):
                await service.noise(channel)
                await service.write(channel, "a message")
                await inbox.wait(1)
            assert [one.text for one in inbox.got] == ["a message"]

    asyncio.run(main())


def test_a_service_that_is_down_is_reported_and_waited_for(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.receives and service.stops and not service.posts)

    async def main() -> None:
        service.stop()
        async with opened(service, plugins) as channel:
            inbox = Inbox()
            async with listening(channel, inbox):
                await until(lambda: channel.trouble)
                assert service.secret not in channel.trouble
                service.start()
                await service.write(channel, "back")
                await inbox.wait(1)
                assert channel.trouble == ""

    asyncio.run(main())


# -- sending --------------------------------------------------------------------------------------------------------


def test_a_message_is_delivered_without_listening(service: ChannelDouble, plugins: Plugins) -> None:
    async def main() -> None:
        async with opened(service, plugins) as channel:
            for number, text in enumerate(("hello", "größer als 🙂 <b>&amp;</b>")):
                sent = await channel.send(outgoing(service, text, number))
                assert sent is None or (isinstance(sent, str) and sent)

    asyncio.run(main())
    if service.kind != CONSOLE:
        assert delivered(service, 2) == [
            (service.peer, "größer als 🙂 <b>&amp;</b>", []),
            (service.peer, "hello", []),
        ]


def test_the_longest_text_is_delivered(service: ChannelDouble, plugins: Plugins) -> None:
    async def main() -> str:
        async with opened(service, plugins) as channel:
            lines = ("🙂" * 30 + "\n") * (channel.longest_text // 61 + 1)
            text = lines.encode("utf-16-le")[: channel.longest_text * 2].decode("utf-16-le", "ignore").strip()
            await channel.send(outgoing(service, text))
            return text

    text = asyncio.run(main())
    if service.kind != CONSOLE:
        assert [one[1] for one in delivered(service, 1)] == [text]


def test_a_file_is_delivered_or_refused(service: ChannelDouble, plugins: Plugins) -> None:
    file = Attachment(*FILE)

    async def main() -> None:
        async with opened(service, plugins) as channel:
            if not service.files:
                with pytest.raises(Undeliverable):
                    await channel.send(outgoing(service, "with a file", 1, file))
                return
            await channel.send(outgoing(service, "" if channel.files_apart else "with a file", 1, file))

    asyncio.run(main())
    if service.files and service.kind != CONSOLE:
        assert [one[2] for one in delivered(service, 1)] == [[FILE[2]]]


def test_a_reply_to_an_unknown_message_is_delivered_or_refused(service: ChannelDouble, plugins: Plugins) -> None:
    async def main() -> None:
        async with opened(service, plugins) as channel:
            for reply_to in ("5", "made/up", "<a b>\r\nBcc: x@example.org"):
                message = Outgoing(id=f"m-{reply_to[:2]}", place=service.place(), text="re", reply_to=reply_to)
                with contextlib.suppress(Undeliverable):
                    await channel.send(message)

    asyncio.run(main())


def test_typing_is_harmless(service: ChannelDouble, plugins: Plugins) -> None:
    async def main() -> None:
        async with opened(service, plugins) as channel:
            await channel.typing(service.place())

    asyncio.run(main())


# -- failures -------------------------------------------------------------------------------------------------------


def test_an_id_that_the_service_does_not_have_is_refused(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.bad_peer)

    async def main() -> None:
        async with opened(service, plugins) as channel:
            with pytest.raises(Undeliverable, match="is not an"):
                await channel.send(outgoing(service, "x", peer=service.bad_peer))

    asyncio.run(main())


def fails(service: ChannelDouble, plugins: Plugins, prepare: Callable[[], None]) -> DeliveryError:
    """Return the error of one message that fails."""

    async def main() -> DeliveryError:
        prepare()
        async with opened(service, plugins) as channel:
            with pytest.raises(DeliveryError) as failed:
                await channel.send(outgoing(service, "fails"))
            return failed.value

    error = asyncio.run(main())
    assert str(error) and service.secret not in str(error)
    return error


def test_a_rejected_message_is_refused(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.refused)
    assert type(fails(service, plugins, service.refuse)) is service.refused


def test_a_limited_message_is_tried_later(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.limited)
    error = fails(service, plugins, service.limit)
    assert isinstance(error, TryLater) and (error.after is None or error.after >= 1)


def test_a_lost_message_is_never_reported_as_undelivered(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.loses)
    assert type(fails(service, plugins, service.lose)) is Unsure


def test_a_service_that_is_down_is_tried_later(service: ChannelDouble, plugins: Plugins) -> None:
    only_if(service.stops)
    assert type(fails(service, plugins, service.stop)) is TryLater
    service.start()

    async def main() -> None:
        async with opened(service, plugins) as channel:
            await channel.send(outgoing(service, "after", 2))

    asyncio.run(main())
    assert [one[1] for one in delivered(service, 1)] == ["after"]


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_channel_closes_unused_and_twice(service: ChannelDouble, plugins: Plugins) -> None:
    async def main() -> None:
        channel = make(service, plugins)
        await channel.close()
        await channel.send(outgoing(service, "opened by use"))
        await channel.close()
        await channel.close()

    asyncio.run(main())
