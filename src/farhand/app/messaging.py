"""Builds messages and channels: outbox, inbound messages, hooks and their tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from farhand.app.fleet import Member
from farhand.channels.registry import ChannelError, make_channels
from farhand.config import Config
from farhand.gateway.access.credentials import Credentials
from farhand.gateway.access.secrets import Secrets
from farhand.gateway.control.approvals import Approvals
from farhand.gateway.messaging.approvals import ChannelApprovals
from farhand.gateway.messaging.channel import ChannelKind, PostedChannel
from farhand.gateway.messaging.hooks import Hooks
from farhand.gateway.messaging.inbound import InboundMessages
from farhand.gateway.messaging.outbox import Messages
from farhand.gateway.messaging.tools import MessageTools
from farhand.gateway.sessions.sessions import Sessions
from farhand.gateway.workspace.workspace import Workspace
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.redaction import KnownSecrets
from farhand.store.ports import Store
from farhand.store.tables.fleet import claim_lease
from farhand.store.tables.waiting_calls import Approval
from farhand.tools.tool import Tool


async def _claimed(database: Store, replica: str, name: str) -> bool:
    """Return whether this gateway is the one of its fleet that does something."""
    return await database.write(partial(claim_lease, name=name, replica=replica), durable=False)


class Messaging:
    """`open` comes before the calls of the last start are taken up, `start` after the sessions; then `close`."""

    def __init__(
        self,
        config: Config,
        environ: Mapping[str, str],
        database: Store,
        sessions: Sessions,
        workspace: Workspace,
        approvals: Approvals,
        credentials: Credentials,
        secrets: KnownSecrets,
        handles: Secrets,
        *,
        kinds: Mapping[str, Callable[[], ChannelKind]],
        clock: Callable[[], int],
        frozen: Callable[[], FreezeOrder | None],
        approvers: Callable[[], Sequence[str]],
        member: Member | None = None,
    ) -> None:
        """`kinds` load the kinds of channels. `approvers` returns who may approve calls, by channel and address.
        `member`: this gateway among those that share the store, if any.

        Raises ChannelError for invalid settings.
        """
        self._member = member
        self._sessions = sessions
        self._approvals = approvals
        self.outbox = Messages(database, workspace, clock=clock, alone=member is None, hide=secrets.redact_text)
        self._channel_approvals = ChannelApprovals(approvals, self.outbox, approvers)
        self.inbound = InboundMessages(
            database,
            self.outbox,
            sessions,
            workspace,
            clock=clock,
            bindings=config.bindings,
            dm_scope=config.sessions.dm_scope,
            identity_links=config.sessions.identity_links,
            removed=credentials.announce_removed,
            intercept=self._channel_approvals.receive,
            may_listen=None if member is None else partial(_claimed, database, member.id),
        )
        self.hooks = Hooks(
            database,
            sessions,
            self.outbox,
            self.inbound,
            config.hooks,
            clock=clock,
            learn=secrets.add,
            invalid=credentials.ended,
            frozen=lambda: None if (order := frozen()) is None else order.summary,
            removed=credentials.announce_removed,
        )
        for name, channel in make_channels(config.channels, environ, kinds, handles.resolved).items():
            self.outbox.connect(name, channel)
            if isinstance(channel, PostedChannel):
                if name in config.hooks:
                    raise ChannelError(f"[hooks.{name}] and [channels.{name}] have the same address; rename one")
                self.hooks.add_post_handler(name, channel.post_handler())

    def tools(self) -> list[Tool]:
        return MessageTools(self.outbox, self._sessions).tools()

    async def ask(self, approval: Approval) -> None:
        """Send the question of a waiting call to everyone who may approve it."""
        await self._channel_approvals.send(approval)

    async def open(self) -> None:
        """Deliver messages that were accepted before the last stop."""
        await self.outbox.start()

    async def start(self) -> None:
        """Receive messages, answer earlier ones, and pass the posts of hooks to their sessions."""
        await self._approvals.notify_pending()
        own = None if self._member is None else self._member.owned
        await self.inbound.start(None if own is None else own("awaited_replies"))
        await self.hooks.start(None if own is None else own("hook_posts"))

    async def take_up(self) -> None:
        """Take up what belongs to this gateway since it took over the work of another one."""
        assert self._member is not None
        await self.inbound.resume(self._member.owned("awaited_replies"))
        await self.hooks.start(self._member.owned("hook_posts"))

    async def close(self) -> None:
        await self.hooks.close()
        await self.inbound.close()
        await self.outbox.close()
