"""Tool names and schemas in the form that model APIs accept."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from farhand.protocol.names import COMMON_PREFIX

LONGEST_NAME: Final = 64
# A schema from a node may be nested arbitrarily; deeper levels become unconstrained.
DEEPEST_SCHEMA: Final = 32

_ACCEPTED = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OTHER = re.compile(r"[^A-Za-z0-9_-]")
_ACCEPTED_WITH_DOTS = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OTHER_THAN_DOTS = re.compile(r"[^A-Za-z0-9._-]")
_NOT_AT_ROOT = ("anyOf", "oneOf", "allOf", "not", "enum", "$schema", "$id", "title", "description")


class ToolNames:
    """The two-way mapping of names in one request: `macos.notes.search` is sent as `macos_notes_search`.

    A name that is too long, or would be sent like another one, gets a digest of itself, so both stay callable.
    """

    def __init__(self, names: Iterable[str], *, dots: bool = False) -> None:
        """Map the names. `dots`: the receiver accepts dots in names."""
        accepted, other = (_ACCEPTED_WITH_DOTS, _OTHER_THAN_DOTS) if dots else (_ACCEPTED, _OTHER)
        wanted = dict.fromkeys(names)
        taken = {name for name in wanted if accepted.fullmatch(name)}
        self._sent = {name: name for name in taken}
        plain = {name: other.sub("_", name) for name in wanted if name not in taken}
        often = Counter(plain.values())
        for name, candidate in plain.items():
            unique = often[candidate] == 1 and candidate not in taken and 0 < len(candidate) <= LONGEST_NAME
            # A plug-in's `node.bash` must not pass for `node_bash`.
            sent = candidate if unique and not candidate.startswith(COMMON_PREFIX) else _with_digest(name, candidate)
            # A name may have been chosen to look like another one with its digest.
            while sent in taken:
                sent = _with_digest(sent, candidate)
            taken.add(sent)
            self._sent[name] = sent
        self._meant = {sent: name for name, sent in self._sent.items()}

    def sent(self, name: str) -> str:
        return self._sent[name]

    def meant(self, name: str) -> str:
        """Return the tool for a name from the model; a name that was never sent is returned unchanged."""
        return self._meant.get(name, name)


def _with_digest(name: str, candidate: str) -> str:
    digest = hashlib.blake2s(name.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{candidate[: LONGEST_NAME - len(digest) - 1]}_{digest}"


def normal_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with `type: object` at the root, `properties` in every object, and no parts the model does not
    need.

    An optional value is shown as its own type: omitting it means the same as null, in fewer tokens.
    """
    merged = _alternatives_merged(schema)
    root: dict[str, Any] = {key: value for key, value in merged.items() if key not in _NOT_AT_ROOT}
    root["type"] = "object"
    shown: dict[str, Any] = _shown(root, 0)
    if not shown.get("required"):
        shown.pop("required", None)
    return shown


def _alternatives_merged(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the root with the properties of its alternatives merged, since APIs reject alternatives at the root."""
    merged = dict(schema)
    properties = dict(_mapping(schema.get("properties")))
    required = list(_strings(schema.get("required")))
    for word in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(word)
        if not isinstance(parts, list):
            continue
        demands: list[set[str]] = []
        for part in parts:
            described = _mapping(part)
            for name, value in _mapping(described.get("properties")).items():
                properties.setdefault(name, value)
            demands.append(set(_strings(described.get("required"))))
        if demands:
            common = set.union(*demands) if word == "allOf" else set.intersection(*demands)
            required += sorted(common - set(required))
    return {**merged, "properties": properties, "required": required}


def _shown(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if depth > DEEPEST_SCHEMA:
        return {}
    shown = dict(schema)
    alternatives = shown.get("anyOf")
    if isinstance(alternatives, list):
        others = [part for part in alternatives if part != {"type": "null"}]
        if len(others) == 1 and len(others) < len(alternatives) and isinstance(others[0], Mapping):
            shown = {**{key: value for key, value in shown.items() if key != "anyOf"}, **others[0]}
            if "description" in schema:
                shown["description"] = schema["description"]
    if shown.get("default", ...) is None:
        del shown["default"]
    if shown.get("type") == "object":
        shown.setdefault("properties", {})
    for word in ("properties", "$defs", "definitions", "patternProperties"):
        if isinstance(shown.get(word), Mapping):
            shown[word] = {name: _shown(value, depth + 1) for name, value in shown[word].items()}
    for word in ("items", "additionalProperties"):
        if word in shown:
            shown[word] = _shown(shown[word], depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(shown.get(word), list):
            shown[word] = [_shown(part, depth + 1) for part in shown[word]]
    return shown


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
