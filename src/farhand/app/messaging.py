"""Puts the parts of messages and channels together: outbox, reception, hooks, their tools and doors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from farhand.api.routes.channels import channel_routes
from farhand.api.server.router import Route
from farhand.channels.registry import ChannelError, make_channels
from farhand.channels.webhook import WebhookChannel
from farhand.channels.whatsapp import WhatsAppChannel
from farhand.config import Config
from farhand.gateway.hub import Hub
from farhand.gateway.messaging.approvals import ChannelApprovals
from farhand.gateway.messaging.hooks import Hooks
from farhand.gateway.messaging.inbound import Reception
from farhand.gateway.messaging.outbox import Messages
from farhand.gateway.messaging.tools import MessageTools
from farhand.gateway.sessions.sessions import Sessions
from farhand.gateway.workspace.workspace import Workspace
from farhand.tools.tool import Tool


class Messaging:
    """`open` before the calls of the last start are taken up, `start` after the sessions; then `close`."""

    def __init__(
        self,
        hub: Hub,
        sessions: Sessions,
        workspace: Workspace,
        config: Config,
        environ: Mapping[str, str],
        approvers: Callable[[], Sequence[str]] = list,
    ) -> None:
        """`approvers`: who may approve calls, by channel and address. Raises ChannelError for settings that cannot be
        meant."""
        clock = hub.node_registry.clock
        self.messages = Messages(hub.database, workspace, clock=clock, alone=True, hide=hub.secrets.redact_text)
        self.reception = Reception(
            hub.database,
            self.messages,
            sessions,
            workspace,
            clock=clock,
            bindings=config.bindings,
            dm_scope=config.sessions.dm_scope,
            identity_links=config.sessions.identity_links,
            removed=hub.credentials.announce_removed,
        )
        self.hooks = Hooks(
            hub.database,
            sessions,
            self.messages,
            self.reception,
            config.hooks,
            clock=clock,
            learn=hub.secrets.add,
            invalid=hub.credentials.ended,
            frozen=lambda: None if (order := hub.gate.frozen) is None else order.summary,
            removed=hub.credentials.announce_removed,
        )
        hub.credentials.lent |= {
            "hook": self.hooks.scopes_of,
            "channel": self.reception.scopes_of_channel,
            "peer": self.reception.scopes_of_peer,
        }
        for name, channel in make_channels(config.channels, environ).items():
            self.messages.connect(name, channel)
            if isinstance(channel, WebhookChannel | WhatsAppChannel):
                if name in config.hooks:
                    raise ChannelError(f"[hooks.{name}] and [channels.{name}] have the same address; rename one")
                self.hooks.open_door(name, channel.door())
        self._message_tools = MessageTools(self.messages, sessions)
        self._approvals = hub.approvals
        answers = ChannelApprovals(hub.approvals, self.messages, approvers)
        hub.approvals.tell = answers.tell
        self.reception.overhear = answers.hear

    def tools(self) -> list[Tool]:
        return self._message_tools.tools()

    def routes(self) -> list[Route]:
        return channel_routes(self.messages, self.reception, self.hooks)

    async def open(self) -> None:
        """Deliver what was accepted before."""
        await self.messages.start()

    async def start(self) -> None:
        """Listen, answer what was asked before, and give the hooks' posts to their sessions."""
        await self._approvals.retell()
        await self.reception.start()
        await self.hooks.start()

    async def close(self) -> None:
        await self.hooks.close()
        await self.reception.close()
        await self.messages.close()
