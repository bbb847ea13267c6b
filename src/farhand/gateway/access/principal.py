"""Represent principals: the credential that acts, and the one on whose behalf it acts.

A direct call has only an actor. A call by an agent has the agent as its actor and acts on behalf of the credential that
started the agent's work: a token, the owner, a channel or a hook. A principal has the intersection of both sets of
rights, including restrictions to tools and nodes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from farhand.gateway.access.credentials import OWNER, Credential, Scope
from farhand.tools.tool import CallContext

AGENT_SCOPES = frozenset({Scope.READ.value, Scope.CHAT.value, Scope.TOOLS_EXEC.value})
# The scopes an agent can use on behalf of others; approving, pairing, freezing and administration are excluded.
DELEGATED = (Scope.READ, Scope.CHAT, Scope.TOOLS_EXEC, Scope.TOOLS_WRITE, Scope.TOOLS_READ)


class Principal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold the acting credential and, if they differ, the credential on whose behalf it acts."""

    actor: Credential
    on_behalf_of: Credential | None = None

    @classmethod
    def agent(cls, agent_id: str, asker: Credential) -> Principal:
        """Return the principal of an agent that works on behalf of a credential."""
        return cls(Credential(f"agent:{agent_id}", AGENT_SCOPES), asker)

    @property
    def id(self) -> str:
        """Return the id of the acting credential."""
        return self.actor.id

    @property
    def asker(self) -> Credential:
        """Return the credential that owns everything this principal starts."""
        return self.actor if self.on_behalf_of is None else self.on_behalf_of

    @property
    def credentials(self) -> tuple[Credential, ...]:
        return (self.actor,) if self.on_behalf_of is None else (self.actor, self.on_behalf_of)

    @property
    def askers(self) -> tuple[str, ...]:
        """Return the ids on whose behalf it acts: the asking credential, and the token that made it."""
        if self.on_behalf_of is None:
            return ()
        return tuple(filter(None, (self.on_behalf_of.id, self.on_behalf_of.issuer)))

    @property
    def ids(self) -> frozenset[str]:
        """Return every credential involved; when one of them ends, the principal's work ends."""
        return frozenset(name for one in self.credentials for name in (one.id, one.issuer) if name)

    @property
    def narrowed(self) -> bool:
        return any(credential.narrowed for credential in self.credentials)

    @property
    def may_steer(self) -> bool:
        """Return whether it may change an agent's steering files, which requires the same right as making it act."""
        return self.may(Scope.CHAT) and not any(one.tools or one.nodes for one in self.credentials if not one.pinned)

    def may(self, scope: Scope | tuple[Scope, ...]) -> bool:
        return all(credential.may(scope) for credential in self.credentials)

    def may_know(self, node_id: str) -> bool:
        """Return whether it may be told of a node."""
        return all(credential.may_know(node_id) for credential in self.credentials)

    def reaches(self, node_id: str | None, tool: str, *, of_server: bool = False) -> bool:
        return all(credential.reaches(node_id, tool, of_server=of_server) for credential in self.credentials)


def covers(one: Credential, other: Credential) -> bool:
    """Return whether an agent may do for `one` everything it may do for `other`."""
    same_reach = one.id == other.id and (one.tools, one.nodes, one.pinned) == (other.tools, other.nodes, other.pinned)
    return (same_reach or not one.narrowed) and all(one.may(scope) for scope in DELEGATED if other.may(scope))


def limited(credential: Credential, *scopes: Scope) -> Credential:
    """Return the credential restricted to these scopes."""
    return msgspec.structs.replace(
        credential, scopes=frozenset(scope.value for scope in scopes if credential.may(scope))
    )


def principal_of(context: CallContext) -> Principal:
    """Return the principal of the call that a gateway tool serves."""
    if not isinstance(context.principal, Principal):
        raise TypeError(f"call {context.call_id} of {context.credential} carries no principal")
    return context.principal


def readable_owner(context: CallContext) -> str | None:
    """Return the credential whose sessions and jobs alone a caller may see; None: it may see all."""
    principal = principal_of(context)
    return None if principal.may(Scope.READ) else principal.asker.id


def encode_credential(credential: Credential) -> bytes:
    return msgspec.json.encode(credential)


def decode_credential(stored: bytes | msgspec.Raw | dict[str, Any]) -> Credential:
    """Decode a stored credential; the owner with all rights is always the same object."""
    if isinstance(stored, dict):
        found = msgspec.convert(stored, Credential, strict=False)
    else:
        found = msgspec.json.decode(stored, type=Credential)
    return OWNER if found == OWNER else found


def decode_principal(stored: bytes | msgspec.Raw) -> Principal:
    """Decode a stored principal. Earlier versions stored only the acting credential."""
    fields = msgspec.json.decode(stored)
    if "actor" not in fields:
        return Principal(decode_credential(stored))
    behalf = fields.get("on_behalf_of")
    return Principal(decode_credential(fields["actor"]), None if behalf is None else decode_credential(behalf))
