"""Session commands in messages: `/new`, `/stop`, `/status`, `/freeze`, `/model`, `/think`, `/help` …"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, get_args

import msgspec

from farhand.gateway.access.credentials import Credential
from farhand.gateway.sessions import keys as session_keys
from farhand.llm.model import THINKING_LEVELS, Thinking
from farhand.protocol.errors import InvalidArgs, NotFound
from farhand.store.tables.sessions import SessionRecord

if TYPE_CHECKING:
    from farhand.gateway.sessions.sessions import Sessions

Compact = Callable[["Sessions", SessionRecord, Credential], Awaitable[str]]

HELP: Final = """\
/new (/reset)    begin a new conversation; the old one stays in the history
/stop            stop what runs, and every process it started
/freeze [WHY]    stop everything on every machine, until `farhand thaw` on the command line lifts it
/status          what this session is doing, and what it has cost
/compact         replace the older part of the conversation by a summary
/model [NAME]    show or choose the model; /model default goes back
/think [LEVEL]   show or choose how long it thinks: off, minimal, low, medium, high, xhigh
/help            this list"""

_NAMES: Final = {
    "/new": "new",
    "/reset": "new",
    "/stop": "stop",
    "/status": "status",
    "/compact": "compact",
    "/model": "model",
    "/think": "think",
    "/thinking": "think",
    "/t": "think",
    "/freeze": "freeze",
    "/help": "help",
    "/?": "help",
}
# Maximum characters of a command; only the beginning of a longer message is parsed.
LONGEST: Final = 1024
_WITH_ARGUMENT: Final = ("model", "think", "compact")
FREEZE: Final = "freeze"
# Commands that change a session for everyone in it.
OF_THE_OWNER: Final = frozenset({"new", "stop", "compact", "model", "think"})
# Commands for people the owner has not named: in their own session, and in a group.
OF_GUESTS: Final = frozenset({"new", "stop", "status", "help"})
OF_GUESTS_IN_GROUPS: Final = frozenset({"help"})


class Command(msgspec.Struct, frozen=True):
    name: str
    argument: str = ""


def read(text: str) -> Command | None:
    """Parse a message that is a command; return None for an ordinary message, which may also start with a slash."""
    # Commands are short. The reason of a freeze may be longer, and is cut.
    words = text[:LONGEST].split()
    name = _NAMES.get(words[0].lower()) if words else None
    if name == FREEZE:
        return Command(name, " ".join(words[1:]))
    if name is None or len(text) > LONGEST or len(words) > 2 or (len(words) == 2 and name not in _WITH_ARGUMENT):
        return None
    return Command(name, words[1] if len(words) == 2 else "")


async def obey(sessions: Sessions, key: str, command: Command, asker: Credential, compact: Compact | None) -> str:
    """Run a command on behalf of a credential and return its reply. Raises ToolError."""
    match command.name:
        case "new":
            await sessions.stop(key, "a new conversation was begun")
            await sessions.begin_anew(key)
            return "New conversation."
        case "stop":
            stopped = await sessions.stop(key, "stopped by /stop")
            return f"Stopped {len(stopped)} run{'s'[: len(stopped) != 1]}." if stopped else "Nothing is running."
        case "status":
            return await _status(sessions, key)
        case "compact":
            if sessions.current(key) is not None:
                raise InvalidArgs("a run is under way; /stop it first, or wait")
            if compact is None:
                raise NotFound("this gateway cannot compact")
            return await compact(sessions, await sessions.find(key), asker)
        case "model":
            return await _model(sessions, key, command.argument)
        case "think":
            return await _think(sessions, key, command.argument)
    return HELP


async def _status(sessions: Sessions, key: str) -> str:
    record = await sessions.find(key)
    run = sessions.current(key)
    waiting = sessions.waiting(key)
    doing = "idle" if run is None else f"at work on run {run.id}" + (f", {waiting} waiting" if waiting else "")
    lines = [
        f"Session {session_keys.short(key)} (agent {record.agent_id}): {doing}",
        f"Model: {sessions.describe_model(record)}" + (f", thinking {record.thinking}" if record.thinking else ""),
        f"Messages: {record.messages}; context: {record.context_tokens} tokens; compactions: {record.compactions}",
        f"Used: {record.prompt_tokens} prompt and {record.completion_tokens} completion tokens, ${record.cost:.4f}",
    ]
    return "\n".join(lines)


async def _model(sessions: Sessions, key: str, name: str) -> str:
    if not name:
        return f"Model: {sessions.describe_model(await sessions.find(key))}"
    if name == "default":
        await sessions.change(key, model=None)
        return f"Model: {sessions.describe_model(await sessions.find(key))}"
    chosen = sessions.check_model(name)
    await sessions.change(key, model=name)
    return f"Model: {chosen}"


async def _think(sessions: Sessions, key: str, level: str) -> str:
    if not level:
        record = await sessions.find(key)
        return f"Thinking: {record.thinking or 'as the model does by default'}"
    chosen = THINKING_LEVELS.get(level.lower())
    if chosen is None:
        raise InvalidArgs(f"{level!r} is not a level of thinking; choose one of {', '.join(get_args(Thinking))}")
    await sessions.change(key, thinking=chosen)
    return f"Thinking: {chosen}"
