"""The JSON schema of a typed function, and decoding its arguments with the same types.

The signature becomes a record type, which provides both the schema that callers see and the validation of their
arguments.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Annotated, Any, Final, get_origin, get_type_hints

import msgspec

from farhand.protocol.errors import InvalidArgs

_LONGEST_NAME: Final = 100
_MAX_NAMES: Final = 200
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Parameters:
    """The parameters of a tool function, except its leading context."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        skip: int = 0,
        without: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
        descriptions: Mapping[str, str] | None = None,
    ) -> None:
        """Read the signature of `function`, without its first `skip` parameters and those named in `without`.

        `aliases` maps additional names to the parameters they denote. `descriptions` has texts for parameters whose
        annotation has none: `Annotated[int, "How many."]` has one. Raises ValueError for a signature that cannot be
        described in JSON.
        """
        name = getattr(function, "__name__", "tool")
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in without]
        if any(parameter.kind not in _POSITIONAL for parameter in parameters[:skip]) or len(parameters) < skip:
            raise ValueError(f"{name}: {skip} leading parameter(s) must accept the context of the call")
        hints = _hints(function, parameters[skip:])
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for parameter in parameters[skip:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ValueError(f"{name}: parameter {parameter.name!r} has no name a caller could use")
            kind = _described(hints.get(parameter.name, Any), (descriptions or {}).get(parameter.name, ""))
            if parameter.default is parameter.empty:
                fields.append((parameter.name, kind))
            else:
                fields.append((parameter.name, kind, _default(parameter.default)))
        try:
            self._record = msgspec.defstruct(name, fields, kw_only=True, rename=_shown_name, forbid_unknown_fields=True)
            self._decoder = msgspec.json.Decoder(self._record)
            self.schema = _plain_schema(self._record)
        except TypeError as error:
            raise ValueError(f"{name}: a parameter's type cannot be read from JSON: {error}") from None
        # The names for callers, in the order of the signature.
        self.names: tuple[str, ...] = tuple(self.schema["properties"])
        self.aliases: Mapping[str, str] = dict(aliases or {})

    def read(self, args: msgspec.Raw) -> dict[str, Any]:
        """Return keyword arguments for the function. Raises InvalidArgs naming the invalid parameter."""
        text = bytes(args)
        if text == b"null":
            text = b"{}"
        try:
            return self._keywords(self._decoder.decode(text))
        except _UNREADABLE as error:
            fault = error
        try:
            arguments = msgspec.json.decode(text)
        except _UNREADABLE as error:
            raise InvalidArgs(_worded(str(error))) from None
        if not isinstance(arguments, dict):
            raise InvalidArgs(_worded(str(fault)))
        return self.convert(arguments)

    def convert(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Validate decoded arguments, as `read` does."""
        named = self.canonical(args)
        try:
            return self._keywords(msgspec.convert(named, self._record))
        except _UNREADABLE as error:
            raise InvalidArgs(_worded(str(error))) from None

    def canonical(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments under the parameters' own names; see `canonical_names`."""
        return canonical_names(args, self.names, self.aliases)

    def _keywords(self, record: Any) -> dict[str, Any]:
        return {field: getattr(record, field) for field in self._record.__struct_fields__}


def canonical_names(arguments: Mapping[str, Any], names: Collection[str], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments with each alias replaced by the parameter it stands for.

    This is the only place that handles aliases: policy, previews and tools see its result. Raises InvalidArgs for an
    unknown name, and for two spellings of the same parameter.
    """
    named: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for given, value in arguments.items():
        name = aliases.get(given, given)
        if name not in names:
            raise unknown_parameter(given, names)
        if name in named:
            both = f"{spelled[name]!r} and {given!r}"
            raise InvalidArgs(f"ambiguous arguments: {both} are names of the same parameter {name!r}; give one of them")
        named[name], spelled[name] = value, given
    return named


def unknown_parameter(given: str, names: Collection[str]) -> InvalidArgs:
    """Return the error for an unknown parameter, with the closest valid name first."""
    wrong = f"unknown parameter {given[:_LONGEST_NAME]!r}"
    if not names:
        return InvalidArgs(f"{wrong}; this tool has no parameters")
    # The names may be those of a node's schema: any number of them, of any length.
    known = [name for name in islice(names, _MAX_NAMES) if len(name) <= _LONGEST_NAME]
    more = f" and {len(names) - len(known)} more" if len(known) < len(names) else ""
    near = _closest(given, known)
    hint = "valid parameters" if near is None else f"did you mean {near!r}? Valid parameters"
    return InvalidArgs(f"{wrong}; {hint}: {', '.join(known)}{more}")


def encode_argument(parameter: str, text: str) -> bytes:
    """Return the UTF-8 form of an argument. Raises InvalidArgs for text that is not valid Unicode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgs(f"parameter '{parameter}': not valid Unicode at character {error.start}") from None


def _closest(given: str, names: Collection[str]) -> str | None:
    if len(given) > _LONGEST_NAME:
        return None
    import difflib  # noqa: PLC0415 - needed only for mistakes

    folded = {_folded(name): name for name in names}
    near = difflib.get_close_matches(_folded(given), folded, 1, 0.5)
    return folded[near[0]] if near else None


def _folded(name: str) -> str:
    """Fold naming conventions: `old_text` and `oldText` become equal."""
    return name.casefold().replace("_", "").replace("-", "")


def _shown_name(parameter: str) -> str | None:
    """Return `from` for `from_`: a keyword cannot be the name of a parameter."""
    word = parameter.removesuffix("_")
    return word if keyword.iskeyword(word) else None


def _hints(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> dict[str, Any]:
    # Only of parameters a caller sends: the types of context and result may be importable by type checkers only.
    written = {
        parameter.name: parameter.annotation for parameter in parameters if parameter.annotation is not parameter.empty
    }
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    scope = getattr(inspect.unwrap(inner), "__globals__", {})
    try:
        return get_type_hints(SimpleNamespace(__annotations__=written), scope, include_extras=True)
    except NameError as error:
        raise ValueError(f"{getattr(function, '__name__', 'tool')}: a parameter's type is unknown: {error}") from None


def _described(kind: Any, default: str) -> Any:
    """Return a type with the description that its annotation contains, or else the default."""
    notes = kind.__metadata__ if get_origin(kind) is Annotated else ()
    said = next((text for note in notes if (text := _text_of(note))), default)
    return Annotated[kind, msgspec.Meta(description=said)] if said else kind


def _text_of(annotation: Any) -> str:
    """Return the text of a plain string, a `Doc`, or an object with a `description`."""
    if isinstance(annotation, str):
        return inspect.cleandoc(annotation)
    found = getattr(annotation, "documentation", None) or getattr(annotation, "description", None)
    return found if isinstance(found, str) else ""


def _default(value: Any) -> Any:
    # A mutable default is copied for each call.
    if isinstance(value, list | dict | set) and value:
        return msgspec.field(default_factory=lambda: type(value)(value))
    return value


def _plain_schema(record: type) -> dict[str, Any]:
    """Return an inline object schema: model APIs require `type: object` at the root."""
    (root,), definitions = msgspec.json.schema_components([record], ref_template="#/$defs/{name}")
    schema = dict(definitions.pop(root["$ref"].rpartition("/")[2]))
    schema.pop("title", None)
    schema.setdefault("properties", {})
    if not schema.get("required"):
        schema.pop("required", None)
    if definitions:
        schema["$defs"] = definitions
    return schema


def _worded(text: str) -> str:
    """Turn `Expected `int`, got `str` - at `$.limit`` into `parameter 'limit': expected int, got str`."""
    reason, _, place = text.partition(" - at ")
    reason = reason.replace("`", "'")
    reason = reason[:1].lower() + reason[1:]
    if reason.startswith("object missing required field"):
        return reason.replace("object missing required field", "missing required parameter")
    if place:
        return f"parameter '{place.strip('`').removeprefix('$.')}': {reason}"
    return f"arguments: {reason}"
