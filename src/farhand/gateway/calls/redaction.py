"""Remove the gateway's secrets from results of calls, and parts of secrets where a node cut a longer text.

A node does not know the gateway's secrets. While a command prints, it shows the newest characters again and again, so a
secret could leave in two harmless-looking halves. Where such an excerpt begins or ends in the middle of a text, what
looks like a part of a secret is hidden too; if it is none, the next answer shows it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.gateway.calls.open_call import result_of
from farhand.machine.search.grep import LINE
from farhand.protocol.calls import ToolFailure, ToolResult
from farhand.protocol.errors import Failed
from farhand.protocol.json_limits import decode_bounded
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.version import MIB
from farhand.store.tables.calls import CallRecord
from farhand.tools.node_shell import TAIL_CHARS

# Suffixes of the tools that return excerpts. `Read` returns whole lines.
CUTTING: Final = ("__Bash", "__Process", "__Grep")

# Of such an answer. Output has at most 200,000 characters, a search as many bytes as a node sends for it.
MAX_BYTES: Final = 16 * MIB


def redacted(record: CallRecord, secrets: KnownSecrets) -> ToolResult:
    """Return the result of a call that has ended, without secrets: for a model, or to be shortened."""
    result = result_of(record)
    if result.error is not None:
        error = ToolFailure(result.error.kind, secrets.redact_text(result.error.message))
        return msgspec.structs.replace(result, error=error)
    return msgspec.structs.replace(result, result=msgspec.Raw(secrets.redact(bytes(result.result))))


def hide_cuts(result: msgspec.Raw, secrets: KnownSecrets) -> msgspec.Raw:
    """Return the result of such a tool with parts of secrets hidden at its cuts.

    Raises Failed for a result that is too large to look through: no Farhand node returns one.
    """
    data = bytes(result)
    if len(data) < TAIL_CHARS and b'"running"' not in data and (len(data) < LINE or b'"matches"' not in data):
        return result  # nothing was cut
    try:
        if len(data) > MAX_BYTES:
            raise msgspec.DecodeError(f"it has {len(data)} bytes, and at most {MAX_BYTES} are read")
        answer = decode_bounded(data)
    except msgspec.DecodeError as error:
        raise Failed(f"the node's result cannot be searched for secrets: {error}; ask for less") from None
    if not isinstance(answer, dict):
        return result
    shown = _shown(answer, secrets)
    return result if shown == answer else msgspec.Raw(msgspec.json.encode(shown))


def _shown(answer: dict[str, Any], secrets: KnownSecrets) -> dict[str, Any]:
    """Redact an answer, one of the commands in it, or a matching line."""
    shown = dict(answer)
    running = answer.get("status") == "running"
    cut = answer.get("truncated") is True
    for name, value in answer.items():
        match name, value:
            case "output", str():
                shown[name] = secrets.redact_excerpt(value, before=cut, after=running)
            case "tail", str():
                shown[name] = secrets.redact_excerpt(value, before=len(value) >= TAIL_CHARS, after=running)
            case "log", str():
                page = cut or value.count("\n") + 1 != answer.get("totalLines")
                shown[name] = secrets.redact_excerpt(value, before=page, after=page or running)
            case "content", str() if len(value) >= LINE:
                shown[name] = secrets.redact_excerpt(value, after=True)
            case "sessions" | "matches", list():
                shown[name] = [_shown(one, secrets) if isinstance(one, dict) else one for one in value]
    return shown
