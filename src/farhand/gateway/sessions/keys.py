"""Names of sessions.

    main                                   the main session of the agent `main`: agent:main:main
    agent:helper:main                      the main session of another agent
    agent:main:dm:alice                    a person, on every channel          (dm_scope = "per-peer")
    agent:main:telegram:dm:123             a person on one channel             (dm_scope = "per-channel-peer")
    agent:main:telegram:work:dm:123        … through one account of it         (dm_scope = "per-account-channel-peer")
    agent:main:telegram:group:456          a group, channel or thread
    agent:main:telegram:default:guest:123  a person whom the owner has not named, whatever dm_scope says
    agent:main:telegram:default:guest-group:456  what such people say in a group, channel or thread
    agent:main:cron:<job>                  a scheduled task
    agent:main:heartbeat                   the heartbeats
    agent:main:process:<names>.<digest>    a chat of `/agent/process`
    anything-else                          a session of the agent `main`, named by its user

With dm_scope = "main", the default, people whom the owner named share the agent's main session.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from farhand.protocol.errors import InvalidArgs

DmScope = Literal["main", "per-peer", "per-channel-peer", "per-account-channel-peer"]
PeerKind = Literal["dm", "group", "channel", "thread"]

MAIN: Final = "main"
HEARTBEAT: Final = "heartbeat"
GUEST: Final = "guest"
MAX_KEY: Final = 256
MAX_NAME: Final = 40
# The longest id of a guest that is part of a key as it is; a mail address can be too long for a key.
MAX_GUEST: Final = 64
_SHORTEST_PHONE = 10
_AGENT = re.compile(r"[^a-z0-9_-]")
_TOKEN = re.compile(r"[^a-z0-9+\-_@.]")
# The end of a guest's id that is not part of a key as it is; nobody may be named like that.
_DIGEST = re.compile(r"\.[0-9a-f]{16}$")


def agent_id(name: str, default: str = MAIN) -> str:
    """Normalise the id of an agent or account: lower case, letters, digits, `_` and `-`, at most 64 characters."""
    return _AGENT.sub("-", name.strip().lower()).strip("-")[:64].strip("-") or default


def token(text: str, default: str = "unknown") -> str:
    """Return a person's or place's name on a channel as a part of a key, without separators."""
    return _TOKEN.sub("_", text.strip().lower()) or default


def main_key(agent: str = MAIN) -> str:
    return f"agent:{agent}:{MAIN}"


def cron_key(agent: str, job_id: str) -> str:
    return f"agent:{agent}:cron:{token(job_id)}"


def child_key(agent: str, call_id: str) -> str:
    """Return the key of a sub-agent, named after the call that spawned it."""
    return f"agent:{agent}:sub:{call_id}"


def heartbeat_key(agent: str) -> str:
    return f"agent:{agent}:{HEARTBEAT}"


def once_key(agent: str, run_id: str) -> str:
    """Return the key for a request whose client keeps the conversation itself."""
    return f"agent:{agent}:once:{run_id}"


def process_key(channel: str, user: str, session: str) -> str:
    """Return the key of a chat of `/agent/process`: readable names and a digest that makes it unique."""
    parts = (channel, user, session)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    name = ".".join(token(part)[:MAX_NAME] for part in parts)
    return f"agent:{MAIN}:process:{name}.{digest}"


def peer_key(
    agent: str,
    channel: str,
    kind: str,
    peer: str,
    *,
    account: str = "default",
    scope: DmScope = "main",
    links: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return the session of a person who writes through a channel."""
    agent, channel, kind = agent_id(agent), token(channel), token(kind, "dm")
    if kind != "dm":
        return f"agent:{agent}:{channel}:{kind}:{token(peer)}"
    if scope == "main":
        return main_key(agent)
    who = token(_linked(channel, peer, links or {}) or peer)
    if scope == "per-peer":
        return f"agent:{agent}:dm:{who}"
    if scope == "per-channel-peer":
        return f"agent:{agent}:{channel}:dm:{who}"
    return f"agent:{agent}:{channel}:{agent_id(account, 'default')}:dm:{who}"


def guest_key(agent: str, channel: str, account: str, peer: str, kind: str = "dm") -> str:
    """Return the session of a person whom the owner has not named, or of such people in a group.

    It is never the session of someone else: not of a person with the same id on another channel or account, and not of
    one whose id differs in spelling alone.
    """
    who = token(peer)
    if who != peer or len(who) > MAX_GUEST or _DIGEST.search(who):
        who = f"{who[:MAX_GUEST]}.{hashlib.sha256(peer.encode(errors='replace')).hexdigest()[:16]}"
    mark = GUEST if kind == "dm" else f"{GUEST}-{token(kind)}"
    return f"agent:{agent_id(agent)}:{token(channel)}:{agent_id(account, 'default')}:{mark}:{who}"


def is_linked(channel: str, peer: str, links: Mapping[str, Sequence[str]]) -> bool:
    """Return whether the settings name the owner of an address."""
    return _linked(token(channel), peer, links) is not None


def canonical(key: str, scope: DmScope = "main") -> str:
    """Return the canonical form of a session key. Raises InvalidArgs for an invalid key."""
    key = key.strip()
    if not key:
        raise InvalidArgs("a session key must not be blank; `main` is the main session")
    if len(key) > MAX_KEY:
        raise InvalidArgs(f"a session key has at most {MAX_KEY} characters, this one has {len(key)}")
    if "/" in key or not key.isprintable():
        raise InvalidArgs(f"{key[:80]!r} is not a session key: no slashes, line breaks or control characters")
    if key == MAIN:
        return main_key()
    if not key.startswith("agent:"):
        return key
    _, name, *rest = key.split(":")
    agent = agent_id(name)
    if not any(rest) or rest == [MAIN]:
        return main_key(agent)
    guest = len(rest) == 4 and rest[2].startswith(GUEST)  # also on an account named `dm`
    if "dm" in rest[:3] and rest[-1] != "dm" and not guest:
        place = rest.index("dm")
        channel = rest[0] if place > 0 else "unknown"
        account = rest[1] if place > 1 else "default"
        return peer_key(agent, channel, "dm", ":".join(rest[place + 1 :]), account=account, scope=scope)
    return f"agent:{agent}:{':'.join(rest)}"


def is_main(key: str) -> bool:
    return key == main_key(agent_of(key))


def is_reserved(key: str) -> bool:
    """Return whether a canonical key is reserved: main, heartbeat, a channel, a job, a hook, a sub-agent, a chat."""
    parts = key.split(":")
    return parts[0] == "agent" and (is_main(key) or len(parts) > 3 or parts[2:] == [HEARTBEAT])


def short(key: str) -> str:
    """Return the short form of a key: the main session is `main`."""
    return MAIN if key == main_key() else key


def agent_of(key: str) -> str:
    return key.split(":")[1] if key.startswith("agent:") else MAIN


def _linked(channel: str, peer: str, links: Mapping[str, Sequence[str]]) -> str | None:
    """Return the configured name of a person with several addresses."""
    wanted = _phone(peer)
    for name, addresses in links.items():
        for address in addresses:
            where, separator, who = address.partition(":")
            if separator and token(where) != channel:
                continue
            if _phone(who if separator else address) == wanted:
                return name
    return None


def _phone(address: str) -> str:
    digits = re.sub(r"\D", "", address)
    return f"+{digits}" if len(digits) >= _SHORTEST_PHONE and not re.search(r"[a-z@]", address.lower()) else address
