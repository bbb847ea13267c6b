"""What a node shows of a longer text: no half of a secret at the place where it was cut.

A node does not know the gateway's secrets, and shows the newest characters of what a command printed, again and again
while it prints: a secret would come in two halves, each innocent. So where such an answer begins or ends in the midst
of a text, a part of a secret there is hidden as well; what turns out to be none is in the next answer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.machine.search.grep import LINE
from farhand.protocol.redaction import KnownSecrets
from farhand.tools.node_shell import TAIL_CHARS

# How the names of tools end that show parts of texts. `Read` shows whole lines.
CUTTING: Final = ("__Bash", "__Process", "__Grep")


def hide_cuts(result: msgspec.Raw, secrets: KnownSecrets) -> msgspec.Raw:
    """The same answer of such a tool, or one with parts of secrets hidden."""
    data = bytes(result)
    if len(data) < TAIL_CHARS and b'"running"' not in data and (len(data) < LINE or b'"matches"' not in data):
        return result  # nothing was cut
    try:
        answer = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return result
    if not isinstance(answer, dict):
        return result
    shown = _shown(answer, secrets)
    return result if shown == answer else msgspec.Raw(msgspec.json.encode(shown))


def _shown(answer: dict[str, Any], secrets: KnownSecrets) -> dict[str, Any]:
    """An answer, one of the commands in it, or a line that matched."""
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
