"""What a channel is to the gateway: the contract of `channels/`, and what crosses it.

DeliveryError               a message was not taken by the service
├── TryLater                surely not delivered; it may work later
├── Unsure                  nobody can tell whether it was delivered
└── Refused                 the service will never take it
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from farhand.gateway.sessions.keys import PeerKind
from farhand.protocol.errors import FarhandError
from farhand.store.tables.outbox import Place

Policy = Literal["open", "allowlist", "pairing"]
Groups = Literal["mention", "all", "off"]
Tools = Literal["none", "read", "write", "all"]


class ChannelSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table `[channels.NAME]`: what all channels have. An adapter adds its own."""

    # Which service; by default the table's name.
    kind: str
    # Which account of it; by default `default`, or the table's name where that is not the kind.
    account: str = ""
    # Who may talk to the agent: anybody, those in `allow`, or also those whom the owner approved.
    policy: Policy = "pairing"
    # Senders, or groups; `*` is anybody.
    allow: list[str] = []
    # Which messages in groups are taken: those that mention the agent, all, none.
    groups: Groups = "mention"
    # What the agent may do for those who write here. By default nothing with `open`, else everything.
    tools: Tools | None = None


class Attachment(msgspec.Struct, frozen=True):
    name: str
    content_type: str
    data: bytes


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """A message that somebody wrote on a channel."""

    # What the service calls it; the same again is the same message.
    id: str
    # Where it is answered: a person, a group, a thread.
    peer: str
    peer_kind: PeerKind = "dm"
    sender: str
    sender_name: str = ""
    text: str
    attachments: tuple[Attachment, ...] = ()
    mentioned: bool = False
    # What an answer refers to where that is more than the place; in groups it is the message itself anyway.
    answers: str | None = None
    # The service vouches for the sender. Without that nobody's rights are had, whatever the settings.
    trusted: bool = True


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message, as a service takes it."""

    # The same for each attempt, so that a service that looks can tell a repetition.
    id: str
    place: Place
    text: str
    reply_to: str | None = None
    attachments: tuple[Attachment, ...] = ()


class DeliveryError(FarhandError):
    """A message was not taken."""


class TryLater(DeliveryError):
    def __init__(self, reason: str, after: float | None = None) -> None:
        """`after`: how many seconds the service asked us to wait."""
        super().__init__(reason)
        self.after = after


class Unsure(DeliveryError):
    """The service may have it or not."""


class Refused(DeliveryError):
    """It cannot be delivered, now or later."""


# Takes a message in; returns once it is on disk, or is not wanted. Raises ToolError when it must come again.
Take = Callable[[Incoming], Awaitable[None]]


class Channel(Protocol):
    """One account of a chat service."""

    @property
    def settings(self) -> ChannelSettings: ...

    @property
    def longest_text(self) -> int:
        """What fits into one message, in UTF-16 units."""

    @property
    def repeatable(self) -> bool:
        """The service, or whoever is behind it, can tell by its id that it has a message already."""

    @property
    def files_apart(self) -> bool:
        """A file is a message of its own, sent after the text; otherwise files go with its last part."""

    @property
    def trouble(self) -> str:
        """Why it does not listen at the moment; empty when it does, or has yet to try."""

    async def run(self, take: Take) -> None:
        """Listen until cancelled; come back by itself from whatever the service or the network does."""

    async def send(self, message: Outgoing) -> str | None:
        """Deliver one message; what the service calls it. Raises DeliveryError."""

    async def typing(self, place: Place) -> None:
        """Show that an answer is being written, as far as the service can."""

    async def close(self) -> None: ...


class ChannelKind(msgspec.Struct, frozen=True):
    """What an entry point of the group `farhand.channels` names: how to make the channels of one chat service."""

    # The keys of its tables in the settings.
    settings: type[ChannelSettings]
    make: Callable[[Any], Channel]


@runtime_checkable
class PostedChannel(Protocol):
    """A channel whose service posts to `/hooks/{name}`."""

    def door(self) -> Any:
        """Return the `gateway.messaging.hooks.Door` that receives the posts."""
