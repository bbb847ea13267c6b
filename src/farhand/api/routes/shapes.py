"""The shapes of answers that are put together from several places, for those who read the description."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from farhand.api.routes.invoke import RouteTaken
from farhand.gateway.calls.catalog import Offer
from farhand.protocol.calls import ToolFailure
from farhand.protocol.freeze import FreezeOrder
from farhand.store.sqlite.snapshots import Recovery
from farhand.store.tables.calls import CallState


class Alive(msgspec.Struct):
    ok: bool


class Version(msgspec.Struct):
    version: str


class NodeCounts(msgspec.Struct):
    known: int
    online: int


class CallCounts(msgspec.Struct):
    open: int


class StoreHealth(msgspec.Struct):
    """When the store was last copied, and what had to be done to it at this start, if anything."""

    backup_at: int | None
    backup_failure: str | None
    recovery: Recovery | None


class Health(msgspec.Struct):
    status: str
    version: str
    gateway_id: str
    nodes: NodeCounts
    calls: CallCounts
    frozen: FreezeOrder | None
    store: StoreHealth


class NodeShown(msgspec.Struct):
    node_id: str
    name: str
    node_type: str
    version: str
    tags: list[str]
    capabilities: list[str]
    # Announced, and bound to another node.
    refused_capabilities: list[str]
    tools: list[str]
    role: str
    online: bool
    # It said so itself, or was told and has not said otherwise.
    frozen: bool
    connected_at: int | None
    last_seen: int | None
    running: int
    runtime: dict[str, Any]


class NodesAnswer(msgspec.Struct):
    nodes: list[NodeShown]
    count: int
    primary: str | None


class ToolsAnswer(msgspec.Struct):
    tools: list[Offer]


class CallShown(msgspec.Struct):
    """A call record; `result` when it went well, `error` when not. Moments are milliseconds since 1970."""

    request_id: str
    id: str
    tool: str
    state: CallState
    route: RouteTaken
    session_key: str | None
    agent_id: str | None
    background: bool
    created_at: int
    deadline_at: int
    ended_at: int | None
    duration_ms: int | None
    args: Any = UNSET
    result: Any = UNSET
    error: ToolFailure | UnsetType = UNSET
    # Of a call that waits: `approval` or `node`.
    waits_for: str | UnsetType = UNSET
    approval_id: str | UnsetType | None = UNSET
    # In the answer to a cancel: the call was over before, and this request changed nothing.
    already_over: bool | UnsetType = UNSET


class CallsAnswer(msgspec.Struct):
    calls: list[CallShown]
    count: int


class TokenShown(msgspec.Struct):
    id: str
    label: str
    node_id: str | None
    scopes: list[str]
    created_at: int
    revoked_at: int | None
    tools: list[str]
    nodes: list[str]
    expires_at: int | None
    public_key: str | None
    last_used_at: int | None
    made_by: str


class TokensAnswer(msgspec.Struct):
    tokens: list[TokenShown]


class TokenMade(TokenShown):
    token: str
