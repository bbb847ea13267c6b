"""Checks arguments against the schema that a node announced for its tool, in bounded time.

The schema is the node's word, and the validator runs on the event loop. So only schemas of a plain kind are used, and
only where schema and arguments are small enough together. Otherwise the arguments are passed on unchecked: the node
checks them itself.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.protocol.errors import InvalidArgs
from farhand.protocol.version import KIB

MAX_BYTES: Final = 128 * KIB
MAX_SUBSCHEMAS: Final = 2000
# Characters of all patterns in a schema. Compiling a pattern takes long for its length, with counted repetition most.
MAX_PATTERN_CHARACTERS: Final = 500
MAX_DEPTH: Final = 32
# Steps of a check, each of about a nanosecond.
MAX_WORK: Final = 32_000_000
# Where subschemas are combined, the validator collects what is wrong with each value by each of them: 40 us for each.
MAX_EXPLAINED: Final = 1000
# Steps for a value, beside those for its bytes.
_VALUE_WORK: Final = 50

_ANNOTATIONS: Final = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"format", "contentEncoding", "contentMediaType"}
)
# Without `multipleOf`: for numbers with extreme exponents it takes 70 us a value.
_ASSERTIONS: Final = frozenset(
    {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength"}
    | {"maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
# Each applies further schemas to the same value.
_COMBINATORS: Final = frozenset({"allOf", "anyOf", "oneOf"})


class ArgumentSchema:
    """A schema ready for use. `of` returns None for one that is not used."""

    def __init__(self, validator: Any, size: _Size) -> None:
        self._validator = validator
        self._size = size

    @classmethod
    def of(cls, schema: dict[str, Any]) -> ArgumentSchema | None:
        size = _Size()
        try:
            if len(msgspec.json.encode(schema)) > MAX_BYTES:
                return None
            size.add(schema)
        except _Unsupported:
            return None
        import jsonschema_rs  # noqa: PLC0415 - some megabytes that an idle gateway does without

        try:
            validator = jsonschema_rs.Draft202012Validator(
                schema, retriever=_fetch_nothing, pattern_options=jsonschema_rs.RegexOptions()
            )
        except ValueError:
            return None
        return cls(validator, size)

    def check(self, arguments: Any, encoded_bytes: int) -> None:
        """Raises InvalidArgs naming the parameter at fault, the first one found."""
        # There are not more values than bytes, so small arguments need not be counted.
        small = self._size.work(encoded_bytes, encoded_bytes) <= MAX_WORK
        values = 0 if small else _values(arguments)
        if (not small and self._size.work(encoded_bytes, values) > MAX_WORK) or self._validator.is_valid(arguments):
            return
        values = values or _values(arguments)
        if self._size.combined * values > MAX_EXPLAINED:
            raise InvalidArgs("arguments: they do not match the schema of the tool")
        try:
            self._validator.validate(arguments)
        except ValueError as failure:
            place = getattr(failure, "instance_path", None)
            if place is None:  # nested deeper than the validator goes
                raise InvalidArgs(f"arguments: they cannot be checked: {failure}") from None
            where = f"parameter '{'.'.join(map(str, place))}': " if place else ""
            missing = getattr(failure.kind, "property", None)  # type: ignore[attr-defined]
            if missing is not None:
                raise InvalidArgs(f"{where}parameter '{missing}' is missing"[:500]) from None
            raise InvalidArgs((where or "arguments: ") + failure.message[:500]) from None  # type: ignore[attr-defined]


class _Unsupported(Exception):
    """The schema has a keyword whose cost is not known to be small, or too much of another."""


class _Size:
    """What a schema can cost. Without references, each subschema is applied at most once to a place in the value."""

    def __init__(self) -> None:
        self.subschemas = 0
        # Subschemas that apply to the same value as another.
        self.combined = 0
        # Bytes of values that a value is compared with.
        self.compared = 0
        self.pattern_characters = 0

    def add(self, schema: Any, depth: int = 0) -> None:
        """Raises _Unsupported."""
        self.subschemas += 1
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self.subschemas > MAX_SUBSCHEMAS:
            raise _Unsupported
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS or keyword in _ASSERTIONS:
                continue
            if keyword in ("const", "enum", "required"):
                self.compared += len(msgspec.json.encode(value))
            elif keyword == "pattern" and isinstance(value, str):
                self.pattern_characters += len(value)
                if self.pattern_characters > MAX_PATTERN_CHARACTERS or "{" in value:
                    raise _Unsupported
            elif keyword in ("items", "additionalProperties"):
                self.add(value, depth + 1)
            elif keyword == "properties" and isinstance(value, dict):
                for one in value.values():
                    self.add(one, depth + 1)
            elif keyword in _COMBINATORS and isinstance(value, list):
                before = self.subschemas
                for one in value:
                    self.add(one, depth + 1)
                self.combined += self.subschemas - before
            else:
                raise _Unsupported

    def work(self, encoded_bytes: int, values: int) -> int:
        """Steps to check a value of this size at most."""
        once = encoded_bytes * (1 + self.pattern_characters) + _VALUE_WORK * values
        return (1 + self.combined) * once + self.compared * values


def _values(value: Any) -> int:
    """How many values there are in a decoded one."""
    found, level = 0, [value]
    while level:
        found += len(level)
        held = [one for one in level if isinstance(one, dict | list)]
        level = [inner for one in held for inner in (one.values() if isinstance(one, dict) else one)]
    return found


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"a tool's schema may not refer to {uri}")
