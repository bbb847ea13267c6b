"""The HTTP client behind the commands: finds the running gateway, sends requests, and explains failures."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from farhand import __version__
from farhand.machine.home import home_folder
from farhand.protocol.errors import FarhandError
from farhand.protocol.pinned_tls import pinned_context

CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 30.0
# Python refuses to parse integers of more than 4300 digits.
MAX_DIGITS: Final = 4000
GATEWAY_FILE: Final = "gateway.json"
TOKEN_FILE: Final = "token"  # noqa: S105


class ClientError(FarhandError):
    """A request failed or was refused. `code` identifies the reason for programs."""

    def __init__(self, code: str, message: str, details: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class NoGateway(ClientError):
    """No gateway answers at the address. Trying again later may help."""

    def __init__(self, message: str, code: str = "no_gateway") -> None:
        super().__init__(code, message)


class ConnectionLost(ClientError):
    """The connection ended before the response was complete."""

    def __init__(self, message: str, code: str = "connection_lost") -> None:
        super().__init__(code, message)


@dataclass(frozen=True)
class Address:
    """The address of a gateway, the token for it, and the home folder it was found in (None if it was given)."""

    url: str
    token: str | None
    home: Path | None
    # The one certificate that it may show; otherwise it is checked as usual.
    certificate: str | None = None


@dataclass(frozen=True)
class Upload:
    """A request body of `size` raw bytes; None if it is not known."""

    size: int | None
    pieces: Iterator[bytes]


@dataclass(frozen=True)
class Answer:
    """A JSON document from the gateway: the text and the parsed value."""

    text: str
    value: Any


def url_path(template: str, *parts: str, **query: Any) -> str:
    """Return a path with each `{}` replaced by a quoted part, and a query without the values that are None."""
    path = template.format(*(quote(part, safe="") for part in parts))
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


class Client:
    """Sends requests to one gateway. The gateway is looked up per request, so creating a client cannot fail."""

    def __init__(self, home: str | None = None, url: str | None = None, certificate: str | None = None) -> None:
        """`certificate` is the only one that a gateway given by `url` may show."""
        self._home_option = home
        self._url_option = url
        self._certificate = certificate

    @property
    def home(self) -> Path:
        return home_folder(self._home_option)

    @property
    def url_given(self) -> bool:
        """Whether the user gave an address, so that the local home may belong to another gateway."""
        return bool(self._url_option or (not self._home_option and os.environ.get("FARHAND_URL")))

    def find(self) -> Address:
        """Return the gateway named by --url, --home, FARHAND_URL or FARHAND_HOME, in this order. Raises ClientError.

        The token of a home is sent only to the gateway of that home.
        """
        url = self._url_option or (None if self._home_option else os.environ.get("FARHAND_URL"))
        token = None if self._home_option and not url else os.environ.get("FARHAND_TOKEN")
        if url:
            url = url if "://" in url else f"http://{url}"
            _split(url)
            own = self._announced()
            if own is not None and url.rstrip("/") == own.url:
                return Address(own.url, token or self._home_token(), None, own.certificate)
            return Address(url.rstrip("/"), token or None, None, self._certificate)
        found = self._announced()
        if found is None:
            raise NoGateway(
                f"no gateway is running on {self.home}; start one with `farhand up`, or give its address with --url"
            )
        return Address(found.url, token or self._home_token(), self.home, found.certificate)

    def _announced(self) -> Address | None:
        """Return the address that a running gateway wrote into the home, without a token."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, ClientError):
            announced = json.loads((self.home / GATEWAY_FILE).read_bytes())
            _split(str(announced["url"]))
            with contextlib.suppress(PermissionError):  # it runs as another user
                os.kill(int(announced["pid"]), 0)
            return Address(str(announced["url"]), None, None, announced.get("certificate"))
        return None

    def _home_token(self) -> str | None:
        path = self.home / TOKEN_FILE
        try:
            return path.read_text().strip() or None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError("no_token", f"cannot read the token {path}: {reason_of(error)}") from None

    # -- requests -----------------------------------------------------------------------------------------

    def get(self, template: str, *parts: str, **query: Any) -> Answer:
        return self.request("GET", url_path(template, *parts, **query))

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.request("POST", path, body, **options)

    def put(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.request("PUT", path, body, **options)

    def delete(self, template: str, *parts: str, **query: Any) -> Answer:
        return self.request("DELETE", url_path(template, *parts, **query))

    def invoke(self, tool: str, args: dict[str, Any], *, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        """Call a tool and return its result. Raises ClientError, also when the call fails."""
        ended = self.post("/v1/tools/invoke", {"tool": tool, "args": args, **body}, headers=headers).value
        if not ended["ok"]:
            raise ClientError(ended["error"]["kind"], ended["error"]["message"])
        return ended["result"]

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = READ_SECONDS,
    ) -> Answer:
        """Send a request and return the JSON answer. The body is sent as JSON, bytes unchanged. Raises ClientError.

        `seconds` limits the time without data; None waits as long as the connection lives. An exception, including
        KeyboardInterrupt, closes the connection.
        """
        with self.open(method, path, body, headers, seconds) as (response, explained), explained:
            data = response.read()
        try:
            return _answer(data)
        except ValueError:
            raise ClientError("not_a_gateway", f"the answer to {path} is not JSON; is this a gateway?") from None

    @contextlib.contextmanager
    def download(self, path: str) -> Iterator[Iterator[bytes]]:
        """Open a body of raw bytes and yield its pieces. Raises ClientError, also while they are read."""
        with self.open("GET", path, seconds=None) as (response, explained):
            yield _read_pieces(response, explained)

    @contextlib.contextmanager
    def stream(
        self,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = READ_SECONDS,
    ) -> Iterator[Iterator[tuple[str, Answer]]]:
        """Open server-sent events and yield their names and data; POST if there is a body. Raises ClientError."""
        method = "GET" if body is None else "POST"
        sent = {"Accept": "text/event-stream", **(headers or {})}
        with self.open(method, path, body, sent, seconds) as (response, explained):
            yield read_events(response, explained)

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = READ_SECONDS,
    ) -> Iterator[tuple[http.client.HTTPResponse, ExplainedErrors]]:
        """Send a request and yield the successful response, with the context in which to read it."""
        address = self.find()
        parts = _split(address.url)
        sent = {"User-Agent": f"farhand/{__version__}", **(headers or {})}
        if address.token:
            sent["Authorization"] = f"Bearer {_header_value(address.token)}"
        data: bytes | Iterator[bytes] | None = body if isinstance(body, bytes) else None
        if isinstance(body, Upload):
            data = body.pieces
            if body.size is not None:
                sent["Content-Length"] = str(body.size)
        elif body is not None and data is None:
            data = _encode(body)
            sent["Content-Type"] = "application/json"
        connection = _connect(address, parts)
        explained = ExplainedErrors(address, seconds)
        try:
            with explained:
                connection.sock.settimeout(seconds)
                try:
                    connection.request(method, parts.path + path, data, sent)
                except (BrokenPipeError, ConnectionResetError):
                    if not isinstance(body, Upload):
                        raise
                    # The gateway refused the upload before reading all of it; the answer says why.
                response = connection.getresponse()
                if response.status >= 300:
                    raise _refusal(address, response)
            yield response, explained
        finally:
            connection.close()


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _encode(body: Any) -> bytes:
    """Return JSON in UTF-8: escaped, most non-Latin text would be more than twice as long."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        before = error.object[max(0, error.start - 20) : error.start]
        raise ClientError("usage", f"cannot send the request: the text after {before!r} is not valid UTF-8") from None
    except ValueError:
        raise ClientError("usage", "cannot send the request: nan and inf are not JSON numbers") from None


def read_json(text: str | bytes) -> Any:
    """Parse JSON, keeping integers that are too long for Python as text. Raises ValueError."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= MAX_DIGITS else digits)


def _answer(data: bytes) -> Answer:
    text = data.decode("utf-8", "replace")
    return Answer(text, read_json(text))


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise ClientError("usage", f"{url!r} is not the address of a gateway; write it as http://127.0.0.1:3210")
    return parts


def _header_value(token: str) -> str:
    if not token.isascii() or not token.isprintable():
        raise ClientError("unauthorized", "the token contains characters that no token has; check FARHAND_TOKEN")
    return token


def _connect(address: Address, parts: SplitResult) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=CONNECT_SECONDS, context=tls_context(address.certificate)
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port or 80, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise NoGateway(
            f"the certificate of {address.url} is not trusted: {error.verify_message}; "
            "set FARHAND_CA_FILE to the authority to trust",
            "untrusted",
        ) from None
    except ssl.SSLError as error:
        raise NoGateway(f"{address.url} does not speak TLS: {error.reason or error}", "not_a_gateway") from None
    except TimeoutError:
        raise NoGateway(f"{address.url} did not answer within {CONNECT_SECONDS:g} s", "timeout") from None
    except socket.gaierror:
        raise NoGateway(f"unknown host {host!r}; check --url or FARHAND_URL") from None
    except ConnectionRefusedError:
        hint = (
            "the gateway may be starting or stopping"
            if address.home
            else "start the gateway on that machine: `farhand up`"
        )
        raise NoGateway(f"nothing answers at {address.url}; {hint}") from None
    except (OSError, UnicodeError) as error:
        raise NoGateway(f"cannot reach {address.url}: {reason_of(error)}") from None
    # A call may run for hours without data; keepalives detect a peer that is gone.
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    return connection


def tls_context(pinned: str | None = None) -> ssl.SSLContext:
    """Return the context that checks certificates; with `pinned`, exactly that one is accepted, whatever its name.

    Raises ClientError if FARHAND_CA_FILE cannot be used.
    """
    if pinned is not None:
        try:
            return pinned_context(pinned)
        except OSError as error:
            raise ClientError("usage", f"cannot read the certificate {pinned}: {reason_of(error)}") from None
    file = os.environ.get("FARHAND_CA_FILE") or None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # includes ssl.SSLError
        raise ClientError("usage", f"cannot use FARHAND_CA_FILE={file}: {reason_of(error)}") from None


class ExplainedErrors:
    """A reusable context that turns connection errors into ClientError."""

    def __init__(self, address: Address, seconds: float | None) -> None:
        self._url = address.url
        self._seconds = seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise ConnectionLost(f"{self._url} sent nothing for {self._seconds:g} s", "timeout") from None
        if isinstance(error, http.client.RemoteDisconnected):
            raise ConnectionLost(f"{self._url} closed the connection without an answer") from None
        if isinstance(error, http.client.BadStatusLine):
            raise ClientError("not_a_gateway", f"{self._url} does not speak HTTP; try https://") from None
        if isinstance(error, http.client.IncompleteRead):
            raise ConnectionLost(f"{self._url} closed the connection in the middle of the answer") from None
        if isinstance(error, (http.client.HTTPException, OSError)):
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ConnectionLost(f"lost the connection to {self._url}: {reason}") from None


def _refusal(address: Address, response: http.client.HTTPResponse) -> ClientError:
    body = response.read(1_000_000).decode("utf-8", "replace")
    try:
        error = json.loads(body)["error"]
        code, message, details = str(error["code"]), str(error["message"]), error.get("details")
    except (ValueError, KeyError, TypeError, AttributeError):
        code, details = f"http_{response.status}", None
        message = f"{address.url} answered {response.status} {response.reason}; this is not a gateway's answer"
    if response.status == 401:
        if not address.token:
            message = f"{address.url} requires a token: set FARHAND_TOKEN (on the gateway: `farhand token show`)"
        elif address.home is not None and not os.environ.get("FARHAND_TOKEN"):
            message = f"{address.url} rejected the token in {address.home / TOKEN_FILE}; restart the gateway"
        else:
            message = f"{address.url} rejected the token; check FARHAND_TOKEN"
    return ClientError(code, message, details)


def _read_pieces(response: http.client.HTTPResponse, explained: ExplainedErrors) -> Iterator[bytes]:
    left = int(response.headers.get("Content-Length", 0))
    while left:
        with explained:
            piece = response.read1(1 << 20)
            if not piece:
                raise http.client.IncompleteRead(b"", left)
        left -= len(piece)
        yield piece


def read_events(response: http.client.HTTPResponse, explained: ExplainedErrors) -> Iterator[tuple[str, Answer]]:
    """Yield the name and data of each server-sent event."""
    name, data = "message", list[bytes]()
    while True:
        with explained:
            line = response.readline()
        if not line:
            return
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")
        elif not line:
            if data:
                yield name, _answer(b"\n".join(data))
            name, data = "message", []
