"""Define the contract between the gateway and `channels/`, and the messages that cross it.

DeliveryError               the service did not accept a message
├── TryLater                definitely not delivered; a retry may succeed
├── Unsure                  possibly delivered
└── Undeliverable           permanently rejected
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
    """Define the keys that every `[channels.NAME]` table has. An adapter adds its own."""

    # The kind of service; defaults to the table's name.
    kind: str
    # The account of the service; defaults to `default`, or to the table's name if that is not the kind.
    account: str = ""
    # Who may talk to the agent: everyone, those in `allow`, or those and the senders whom the owner approved.
    policy: Policy = "pairing"
    # Senders or groups; `*` matches all.
    allow: list[str] = []
    # Which group messages to accept: those that mention the agent, all, or none.
    groups: Groups = "mention"
    # What the agent may do for senders on this channel. Defaults to nothing with `open`, otherwise to everything.
    tools: Tools | None = None


class Attachment(msgspec.Struct, frozen=True):
    name: str
    content_type: str
    data: bytes


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """Represent a message received on a channel."""

    # The service's id; a message with the same id is a repetition.
    id: str
    # Where the answer goes: a person, a group or a thread.
    peer: str
    peer_kind: PeerKind = "dm"
    sender: str
    sender_name: str = ""
    text: str
    attachments: tuple[Attachment, ...] = ()
    # Downloads the attachments, for a service that does not send them along. Called only for people who may talk here:
    # strangers must not make the gateway download files. Raises Undeliverable if there is no such file, and another
    # error if the message has to be repeated.
    fetch: Callable[[], Awaitable[list[Attachment]]] | None = None
    mentioned: bool = False
    # What an answer refers to, if not just the peer. In groups, answers always refer to the message.
    answers: str | None = None
    # Whether the service authenticates the sender. If False, the sender is treated as a guest.
    trusted: bool = True


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """Represent one part of a message, small enough for the service."""

    # The same for each attempt, so that a service can detect repetitions.
    id: str
    place: Place
    text: str
    reply_to: str | None = None
    attachments: tuple[Attachment, ...] = ()


class DeliveryError(FarhandError):
    """Report that a message was not delivered."""


class TryLater(DeliveryError):
    def __init__(self, reason: str, after: float | None = None) -> None:
        """Create the error; `after` is how many seconds the service asked us to wait."""
        super().__init__(reason)
        self.after = after


class Unsure(DeliveryError):
    """Report that the message may or may not have been delivered."""


class Undeliverable(DeliveryError):
    """Report that the message can never be delivered."""


# Accepts a message; returns once it is on disk or rejected. Raises ToolError if the service must repeat it.
Take = Callable[[Incoming], Awaitable[None]]


class Channel(Protocol):
    """Represent one account of a chat service."""

    @property
    def settings(self) -> ChannelSettings: ...

    @property
    def longest_text(self) -> int:
        """Return the maximum length of one message, in UTF-16 code units."""

    @property
    def repeatable(self) -> bool:
        """Return whether the receiver can detect a repeated message by its id."""

    @property
    def files_apart(self) -> bool:
        """Return whether each file is sent as a separate message after the text, not with its last part."""

    @property
    def trouble(self) -> str:
        """Return why the channel is not receiving; empty if it is, or has not tried yet."""

    async def run(self, take: Take) -> None:
        """Receive messages until cancelled; recover from any failure of the service or network."""

    async def send(self, message: Outgoing) -> str | None:
        """Deliver one message and return the service's id for it. Raises DeliveryError."""

    async def typing(self, place: Place) -> None:
        """Show a typing indicator, if the service has one."""

    async def close(self) -> None: ...


class ChannelKind(msgspec.Struct, frozen=True):
    """Describe how to create the channels of one service; entry points of the group `farhand.channels` name these."""

    # The keys of its settings tables.
    settings: type[ChannelSettings]
    make: Callable[[Any], Channel]


@runtime_checkable
class PostedChannel(Protocol):
    """Represent a channel whose service posts to `/hooks/{name}`."""

    def post_handler(self) -> Any:
        """Return the `gateway.messaging.hooks.PostHandler` that receives the posts."""
