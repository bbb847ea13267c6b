"""The types between a connection and a route: a request, a reply, and an error that is a reply."""

from __future__ import annotations

import contextlib
import difflib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from farhand.api.server.http_exchange import ClientLeft, HttpExchange
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.gate import MAX_IDEMPOTENCY_KEY
from farhand.protocol.errors import ErrorKind, FarhandError, ToolError
from farhand.protocol.json_limits import check_value_count

# The head of a request: its method, path, query_string, headers, scheme and client, under the names of ASGI.
Scope = MutableMapping[str, Any]

T = TypeVar("T", bound=msgspec.Struct)
F = TypeVar("F")

JSON = b"application/json"
# Limit of bodies that carry content (`Route.content`), from a credential that may write, run or chat.
MAX_BODY_BYTES = 16 * 1024 * 1024
# Limit of all others: reading and hashing 16 MiB blocks the event loop for a good part of a second.
MAX_SMALL_BODY_BYTES = 1024 * 1024
MAX_QUERY_FIELDS = 100
# The path of a value in an error of msgspec, such as "Expected `int`, got `str` - at `$.n`".
_FIELD = re.compile(r"at (?:`key` in )?`\$\.([^`]{1,200})`")
_MISSING = re.compile(r"missing required field `([^`]{1,100})`")
_UNKNOWN = re.compile(r"unknown field `([^`]{1,100})`$")
_HALF = rb"u[dD][%b][0-9a-fA-F]{2}"
# JSON escapes: a whole surrogate pair, half of one (the group), or any other.
_ESCAPE = re.compile(rb"\\(?:%b\\%b|(%b)|.)" % (_HALF % b"89abAB", _HALF % b"c-fC-F", _HALF % b"89a-fA-F"), re.DOTALL)


class Problem(FarhandError):
    """A request that cannot be served: becomes `{"error":{"code","message","details"?}}`."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        details: Any = None,
        headers: list[tuple[bytes, bytes]] | None = None,
        param: str | None = None,
    ) -> None:
        """`param` names the field of the request at fault, for clients of the OpenAI API."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = details
        self.param = param
        self.headers = headers or []

    def reply(self, *, openai: bool = False) -> Reply:
        """Return the error as a reply; `openai`: with the fields that clients of the OpenAI API expect."""
        error: dict[str, Any] = {"code": self.code, "message": str(self)}
        if openai:
            error |= {"type": openai_error_type(self.status), "param": self.param}
        if self.details is not None:
            error["details"] = self.details
        return Reply(msgspec.json.encode({"error": error}), status=self.status, headers=self.headers)


def invalid(message: str, *, param: str | None = None) -> Problem:
    """Return the problem of a request that is not valid."""
    return Problem(400, "invalid_request", message, param=param)


def unknown(what: str, name: str) -> Problem:
    """Return the problem of a request that names something that does not exist."""
    return Problem(404, "not_found", f"there is no {what} {name[:100]!r}")


def existing(found: F | None, what: str, name: str) -> F:
    """Return what was found. Raises the problem of `unknown` if that is nothing."""
    if found is None:
        raise unknown(what, name)
    return found


@contextlib.contextmanager
def refusing(*kinds: type[Exception], status: int = 400, code: str = "invalid_request") -> Iterator[None]:
    """Turn exceptions of these kinds into a problem with the same message."""
    try:
        yield
    except kinds as error:
        raise Problem(status, code, str(error)) from None


def copied(kind: type[T], record: object, **others: Any) -> T:
    """Return a struct with the fields that `record` has under the same names, and `others`."""
    same = {
        name: getattr(record, name) for name in kind.__struct_fields__ if name not in others and hasattr(record, name)
    }
    return kind(**same, **others)


def openai_error_type(status: int) -> str:
    """Return the `type` of an error of the OpenAI API."""
    special = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return special.get(status, "invalid_request_error" if status < 500 else "server_error")


class Reply:
    """The answer of a route: bytes, or a stream of pieces."""

    __slots__ = ("bare", "body", "content_type", "headers", "pieces", "status")

    def __init__(
        self,
        body: bytes = b"",
        *,
        status: int = 200,
        content_type: bytes = JSON,
        headers: list[tuple[bytes, bytes]] | None = None,
        pieces: AsyncIterator[bytes] | None = None,
        bare: bool = False,
    ) -> None:
        """`bare`: sent without redaction, such as a new token for its requester, or a file byte for byte."""
        self.bare = bare
        self.body = body
        self.status = status
        self.content_type = content_type
        self.headers = headers or []
        self.pieces = pieces


def new_request_id() -> str:
    return secrets.token_hex(8)


def json_reply(value: Any, status: int = 200, *, bare: bool = False) -> Reply:
    return Reply(msgspec.json.encode(value), status=status, bare=bare)


class Request:
    """One HTTP request whose sender is authenticated."""

    __slots__ = (
        "_body",
        "_query",
        "address",
        "credential",
        "exchange",
        "headers",
        "id",
        "max_body_bytes",
        "method",
        "params",
        "path",
        "principal",
        "query_string",
        "scheme",
        "session_id",
        "valid",
    )

    def __init__(
        self,
        scope: Scope,
        exchange: HttpExchange,
        headers: dict[bytes, bytes],
        principal: Principal,
        max_body_bytes: int = MAX_SMALL_BODY_BYTES,
    ) -> None:
        """`principal`: the sender, acting for itself."""
        self.exchange = exchange
        self._query: dict[str, list[str]] | None = None
        # A body that was read and is to be read once more.
        self._body: bytes | None = None
        self.max_body_bytes = max_body_bytes
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.scheme: str = scope["scheme"]
        self.query_string: bytes = scope["query_string"]
        self.headers = headers
        self.principal = principal
        self.credential = principal.actor
        # The id in the answer's headers; a route that creates an object sets it to its id.
        self.id = ""
        self.params: dict[str, str] = {}
        # Set if a signed-in browser sent the request.
        self.session_id: str | None = None
        # Says whether the token or session of the request is still valid; None if it cannot end.
        self.valid: Callable[[], bool] | None = None
        client = scope.get("client")
        self.address: str = client[0] if client else ""

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def query(self, name: str) -> str | None:
        """Return the last value of a query parameter. Raises Problem for a query with too many parameters."""
        if self._query is None:
            text = self.query_string.decode("latin-1")
            try:
                self._query = parse_qs(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
            except ValueError:
                reason = f"the query has more than {MAX_QUERY_FIELDS} parameters"
                raise Problem(400, "invalid_request", reason) from None
        values = self._query.get(name)
        return values[-1] if values else None

    @property
    def idempotency_key(self) -> str | None:
        """Return the idempotency key, if any. Raises Problem if it is blank or too long."""
        key = self.header(b"idempotency-key")
        if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
            raise Problem(400, "invalid_request", f"Idempotency-Key has 1 to {MAX_IDEMPOTENCY_KEY} characters")
        return key

    def flag(self, name: str) -> bool:
        """Return a switch that is on unless the query turns it off."""
        return self.query(name) not in ("0", "false", "no")

    def query_int(self, name: str, default: int, low: int, high: int) -> int:
        """Return an integer parameter. Raises Problem if the value is not an integer in the range."""
        text = self.query(name)
        if text is None:
            return default
        if not text.removeprefix("-").isdecimal() or len(text) > 20 or not low <= int(text) <= high:
            shown = repr(text[:50])
            raise Problem(400, "invalid_request", f"{name} must be a whole number from {low} to {high}, not {shown}")
        return int(text)

    async def body(self) -> bytes:
        """Return the whole body. Raises Problem if it is too long, or the client left before its end."""
        if self._body is not None:
            body, self._body = self._body, None
            return body
        exchange = self.exchange
        body = await self._part()
        if exchange.complete and len(body) <= self.max_body_bytes:
            return body
        parts, size = [body], len(body)
        while size <= self.max_body_bytes:
            if exchange.complete:
                return b"".join(parts)
            parts.append(await self._part())
            size += len(parts[-1])
        raise too_large(self.max_body_bytes)

    def rewind(self, body: bytes) -> None:
        """Make a body that was read readable once more."""
        self._body = body

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, of any length. Raises Problem if the client leaves before its end."""
        if self._body is not None:
            body, self._body = self._body, None
            yield body
            return
        more = True
        while more:
            part = await self._part()
            more = not self.exchange.complete
            if part:
                yield part

    async def _part(self) -> bytes:
        try:
            part = self.exchange.take() if self.exchange.complete else await self.exchange.receive()
        except ClientLeft:
            raise Problem(400, "incomplete_request", "the client left before the end of its request") from None
        if self.valid is not None and not self.valid():
            raise Problem(401, "unauthorized", "the token or session ended before the request was complete")
        return part

    async def json(self, decoder: msgspec.json.Decoder[Any]) -> Any:
        """Return the body decoded by `decoder`. Raises Problem with the reason."""
        return read_json(await self.body(), decoder)

    async def gone(self) -> None:
        """Return once the client has left or was answered."""
        await self.exchange.gone()


def read_json(body: bytes, decoder: msgspec.json.Decoder[Any], malformed: str = "invalid_request") -> Any:
    """Decode a body. Raises Problem with the reason, with the code `malformed` if it is not JSON."""
    try:
        if not body.isascii():
            body.decode()
        check_value_count(body)
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        text = "the body is empty" if not body.strip() else json_fault(body, error)
        code = "invalid_request" if isinstance(error, msgspec.ValidationError) else malformed
        found = _FIELD.search(str(error)) or _MISSING.search(str(error))
        if unknown := _UNKNOWN.search(str(error)):
            found, text = unknown, f"{text}{_closest(unknown[1], decoder.type)}"
        param = found[1] if found else None
        raise Problem(400, code, f"the body is not the expected JSON: {text}", param=param) from None


def _closest(given: str, kind: Any) -> str:
    """Return which field of a body was probably meant by an unknown one, or all that there are."""
    known = (
        [field.encode_name for field in msgspec.structs.fields(kind)] if msgspec.inspect.is_struct_type(kind) else []
    )
    near = difflib.get_close_matches(given.lower(), known, 1, 0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; valid fields: {', '.join(known)}" if known else ""


# Bytes of a body that are searched for the cause of an error.
MOST_SEARCHED = 64 * 1024


def json_fault(body: bytes, error: Exception) -> str:
    """Return why a body could not be decoded. For half a surrogate pair, the parser's own message is misleading."""
    for escape in _ESCAPE.finditer(body[:MOST_SEARCHED]) if type(error) is msgspec.DecodeError else ():
        if half := escape[1]:
            return f"\\{half.decode()} at byte {escape.start()} is half of a surrogate pair, which is no character"
    return str(error).replace("`", "'")


def tool_problem(error: ToolError, statuses: Mapping[ErrorKind, int] | None = None) -> Problem:
    """Return a tool error as an HTTP error; `statuses` overrides the usual status of some kinds."""
    status = {**STATUSES, **(statuses or {})}.get(error.kind, 500)
    if status == 503:
        return Problem(503, "unavailable", error.message, headers=[(b"retry-after", b"1")])
    return Problem(status, error.kind.value, error.message)


STATUSES = {
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.INVALID_ARGS: 400,
    ErrorKind.NOT_ALLOWED: 403,
    ErrorKind.TIMEOUT: 504,
}


def too_large(most: int) -> Problem:
    reason = f"the body of this request has at most {most} bytes"
    if most < MAX_BODY_BYTES:
        reason += "; only credentials that may chat or write may send more, to routes that take content"
    return Problem(413, "too_large", reason)


_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_INVALID_NAME = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_INVALID_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def _head(reply: Reply, request_id: str, default: list[tuple[bytes, bytes]]) -> bytes:
    """Return the status line and the headers, without those about the body. Raises ValueError for an invalid header."""
    parts = [_STATUS_LINES[reply.status]]
    parts += [b"%b: %b\r\n" % header for header in default]
    if reply.status not in (204, 304):
        if _INVALID_VALUE.search(reply.content_type):
            raise ValueError(f"an answer cannot have the type {reply.content_type[:100]!r}")
        parts.append(b"content-type: %b\r\n" % reply.content_type)
    parts.append(b"x-request-id: %b\r\nx-content-type-options: nosniff\r\n" % request_id.encode())
    cached = False
    for name, value in reply.headers:
        if _INVALID_NAME.search(name) or _INVALID_VALUE.search(value):
            raise ValueError(f"the header {name!r} cannot have the value {value[:100]!r}")
        cached = cached or name.lower() == b"cache-control"
        parts.append(b"%b: %b\r\n" % (name.lower(), value))
    if not cached:
        parts.append(b"cache-control: no-store\r\n")
    return b"".join(parts)


def complete_answer(reply: Reply, request_id: str, default: list[tuple[bytes, bytes]], *, close: bool) -> bytes:
    """Return the whole response for a reply without pieces. `close`: no other follows on its connection."""
    head = _head(reply, request_id, default)
    if close and (b"connection", b"close") not in reply.headers:
        head += b"connection: close\r\n"
    if reply.status in (204, 304):
        return b"%b\r\n" % head
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(reply.body), reply.body)


async def respond(reply: Reply, exchange: HttpExchange, request_id: str, *, head: bool = False) -> None:
    """Send a reply; with `head`, without its body."""
    if (b"connection", b"close") in reply.headers:
        exchange.keep_alive = False
    if reply.pieces is not None:
        await _respond_in_pieces(reply, reply.pieces, exchange, request_id, head=head)
        return
    answer = complete_answer(reply, request_id, exchange.default_headers, close=not exchange.keep_alive)
    exchange.finish(answer[: len(answer) - len(reply.body)] if head and reply.body else answer)


async def _respond_in_pieces(
    reply: Reply, pieces: AsyncIterator[bytes], exchange: HttpExchange, request_id: str, *, head: bool
) -> None:
    """Raises ValueError if there is more or less than the `content-length` of the reply says."""
    lines = _head(reply, request_id, exchange.default_headers)
    if not exchange.keep_alive and (b"connection", b"close") not in reply.headers:
        lines += b"connection: close\r\n"
    length = next((int(value) for name, value in reply.headers if name == b"content-length"), None)
    if head:
        exchange.finish(lines + b"\r\n")
        return
    await exchange.send(lines + (b"transfer-encoding: chunked\r\n\r\n" if length is None else b"\r\n"))
    sent = 0
    async for piece in pieces:
        sent += len(piece)
        if length is not None and sent > length:
            raise ValueError(f"an answer of {length} bytes has more than that")
        if piece:
            await exchange.send(piece if length is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
    if length is not None and sent < length:
        raise ValueError(f"an answer of {length} bytes ended after {sent}")
    exchange.finish(b"0\r\n\r\n" if length is None else b"")
