"""The HTTP client behind the commands: finds the running gateway, asks it, and says plainly what went wrong."""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

import click

from farhand import __version__
from farhand.cli.json_output import json_option
from farhand.machine.home import home_folder
from farhand.protocol.errors import FarhandError

CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 30.0
# Python refuses to read more than 4300 at once.
MOST_DIGITS: Final = 4000
GATEWAY_FILE: Final = "gateway.json"
TOKEN_FILE: Final = "token"  # noqa: S105

Function = TypeVar("Function", bound=Callable[..., Any])


class ClientError(FarhandError):
    """The gateway could not be asked, or did not do what it was asked. `code` says which, for programs."""

    def __init__(self, code: str, message: str, details: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class NoGateway(ClientError):
    """Nothing answers where a gateway should be. Trying again later may help."""

    def __init__(self, message: str, code: str = "no_gateway") -> None:
        super().__init__(code, message)


class ConnectionLost(ClientError):
    """The connection ended before the whole answer came."""

    def __init__(self, message: str, code: str = "connection_lost") -> None:
        super().__init__(code, message)


@dataclass(frozen=True)
class Address:
    """Where the gateway is, and the token for it."""

    url: str
    token: str | None
    # The home folder in which it was found; None when it was named.
    home: Path | None


@dataclass(frozen=True)
class Upload:
    """A body of raw bytes, as long as said."""

    size: int
    pieces: Iterator[bytes]


@dataclass(frozen=True)
class Answer:
    """A JSON document the gateway sent: as text, and read."""

    text: str
    value: Any


class Client:
    """Asks one gateway. It is looked for at the first request, so making a client cannot fail."""

    def __init__(self, home: str | None = None, url: str | None = None) -> None:
        self._home_option = home
        self._url_option = url

    @property
    def home(self) -> Path:
        return home_folder(self._home_option)

    @property
    def named(self) -> bool:
        """Whether an address was named, so that the home here need not be that gateway's."""
        return bool(self._url_option or (not self._home_option and os.environ.get("FARHAND_URL")))

    def find(self) -> Address:
        """What was named wins over what is found: --url, --home, FARHAND_URL, FARHAND_HOME. Raises ClientError.

        The token of the home is sent to the gateway of that home only, never to another address.
        """
        url = self._url_option or (None if self._home_option else os.environ.get("FARHAND_URL"))
        token = None if self._home_option and not url else os.environ.get("FARHAND_TOKEN")
        if url:
            url = url if "://" in url else f"http://{url}"
            _split(url)
            if not token and url.rstrip("/") == self._announced_url():
                token = self._home_token()
            return Address(url.rstrip("/"), token or None, None)
        found = self._announced_url()
        if found is None:
            raise NoGateway(
                f"no gateway is running on {self.home}; start one with `farhand up`, or name one with --url"
            )
        return Address(found, token or self._home_token(), self.home)

    def _announced_url(self) -> str | None:
        """What a gateway wrote into the home when it began to serve, unless it has ended since."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, ClientError):
            known = json.loads((self.home / GATEWAY_FILE).read_bytes())
            _split(str(known["url"]))
            with contextlib.suppress(PermissionError):  # somebody else's, but alive
                os.kill(int(known["pid"]), 0)
            return str(known["url"])
        return None

    def _home_token(self) -> str | None:
        path = self.home / TOKEN_FILE
        try:
            return path.read_text().strip() or None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ClientError("no_token", f"the token {path} cannot be read: {reason}") from None

    # -- asking -----------------------------------------------------------------------------------------

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = READ_SECONDS,
    ) -> Answer:
        """One request, answered with JSON. The body is sent as JSON, bytes as they are. Raises ClientError.

        `seconds` is the longest silence to bear; None waits for as long as the connection lives. Leaving with an
        exception, KeyboardInterrupt included, closes the connection.
        """
        with self._asked(method, path, body, headers or {}, seconds) as (response, worded), worded:
            data = response.read()
        text = data.decode("utf-8", "replace")
        try:
            return Answer(text, read_json(text))
        except ValueError:
            raise ClientError("not_a_gateway", f"{path} was answered with something that is not JSON") from None

    @contextlib.contextmanager
    def download(self, path: str) -> Iterator[Iterator[bytes]]:
        """The bytes of an answer, piece by piece. Raises ClientError, also while they are read."""
        with self._asked("GET", path, None, {}, None) as (response, worded):
            yield _read_pieces(response, worded)

    @contextlib.contextmanager
    def events(self, after: int, *, follow: bool, seconds: float = READ_SECONDS) -> Iterator[Iterator[Any]]:
        """Entries of the journal after an id. Raises ClientError, also while they are read."""
        headers = {"Last-Event-ID": str(after), "Accept": "text/event-stream"}
        with self._asked("GET", f"/v1/events?follow={int(follow)}", None, headers, seconds) as (response, worded):
            yield _read_events(response, worded)

    @contextlib.contextmanager
    def stream(
        self, path: str, seconds: float, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[Iterator[Any]]:
        """The data of the events at `path`; `seconds` is the longest silence to bear. Raises ClientError, as above.

        With a body it is posted.
        """
        sent = {"Accept": "text/event-stream", **(headers or {})}
        method = "GET" if body is None else "POST"
        with self._asked(method, path, body, sent, seconds) as (response, worded):
            yield _read_events(response, worded)

    @contextlib.contextmanager
    def named_events(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> Iterator[Iterator[tuple[str, str]]]:
        """Post `body` and yield the name and data of each event of the answer. Raises ClientError, as above."""
        sent = {"Accept": "text/event-stream", **(headers or {})}
        with self._asked("POST", path, body, sent, seconds) as (response, worded):
            yield _read_named_events(response, worded)

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], seconds: float | None
    ) -> Iterator[tuple[http.client.HTTPResponse, _Worded]]:
        """A response that is good news, with what to read it under; its connection is closed in the end."""
        address = self.find()
        parts = _split(address.url)
        sent = {"User-Agent": f"farhand/{__version__}", **headers}
        if address.token:
            sent["Authorization"] = f"Bearer {_header_value(address.token)}"
        data: bytes | Iterator[bytes] | None = body if isinstance(body, bytes) else None
        if isinstance(body, Upload):
            data = body.pieces
            sent["Content-Length"] = str(body.size)
        elif body is not None and data is None:
            data = _utf8(body)
            sent["Content-Type"] = "application/json"
        connection = _connect(address, parts)
        worded = _Worded(address, seconds)
        try:
            with worded:
                connection.sock.settimeout(seconds)
                try:
                    connection.request(method, parts.path + path, data, sent)
                except (BrokenPipeError, ConnectionResetError):
                    if not isinstance(body, Upload):
                        raise
                    # It was refused before all of it was sent; the answer says why.
                response = connection.getresponse()
                if response.status >= 300:
                    raise _refusal(address, response)
            yield response, worded
        finally:
            connection.close()


def _utf8(body: Any) -> bytes:
    """A body as JSON, in characters: escaped, most of the world's would be twice as long and more."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        part = error.object[max(0, error.start - 20) : error.start]
        raise ClientError("usage", f"what is sent has to be text, and after {part!r} comes something else") from None
    except ValueError:
        raise ClientError("usage", "a number that is sent has to be one of JSON's, which nan and inf are not") from None


def read_json(text: str | bytes) -> Any:
    """A whole number of more digits than Python reads stays the text that it is. Raises ValueError."""
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int | str:
    return int(digits) if len(digits) <= MOST_DIGITS else digits


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise ClientError("usage", f"{url!r} is not the address of a gateway; it looks like http://127.0.0.1:3210")
    return parts


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _header_value(token: str) -> str:
    if not token.isascii() or not token.isprintable():
        raise ClientError("unauthorized", "the token has characters that no token has; check FARHAND_TOKEN")
    return token


def _connect(address: Address, parts: SplitResult) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, parts.port, timeout=CONNECT_SECONDS, context=trust())
    else:
        connection = http.client.HTTPConnection(host, parts.port or 80, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise NoGateway(
            f"the certificate of {address.url} is not trusted: {error.verify_message}; "
            "FARHAND_CA_FILE names the authority to trust",
            "untrusted",
        ) from None
    except ssl.SSLError as error:
        raise NoGateway(f"{address.url} does not speak TLS: {error.reason or error}", "not_a_gateway") from None
    except TimeoutError:
        raise NoGateway(f"{address.url} did not answer within {CONNECT_SECONDS:g} s", "timeout") from None
    except socket.gaierror:
        raise NoGateway(f"the name {host!r} is not known; check --url or FARHAND_URL") from None
    except ConnectionRefusedError:
        hint = "it may be starting or stopping" if address.home else "is it running there? `farhand up` starts one"
        raise NoGateway(f"nothing answers at {address.url}; {hint}") from None
    except (OSError, UnicodeError) as error:
        raise NoGateway(f"{address.url} cannot be reached: {getattr(error, 'strerror', None) or error}") from None
    # A call may take hours in silence; this is how a peer that vanished is found out all the same.
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    return connection


def trust() -> ssl.SSLContext:
    """Whom to believe that they are who they say. Raises ClientError."""
    file = os.environ.get("FARHAND_CA_FILE") or None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # ssl.SSLError is one
        raise ClientError("usage", f"FARHAND_CA_FILE={file} cannot be used: {error.strerror or error}") from None


class _Worded:
    """What goes wrong on a connection inside of this becomes a ClientError. Reusable."""

    def __init__(self, address: Address, seconds: float | None) -> None:
        self._url = address.url
        self._seconds = seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise ConnectionLost(f"{self._url} was silent for {self._seconds:g} s", "timeout") from None
        if isinstance(error, http.client.RemoteDisconnected):
            raise ConnectionLost(f"{self._url} closed the connection before it answered") from None
        if isinstance(error, http.client.BadStatusLine):
            raise ClientError("not_a_gateway", f"{self._url} does not speak HTTP; is it https://?") from None
        if isinstance(error, http.client.IncompleteRead):
            raise ConnectionLost(f"{self._url} closed the connection in the middle of its answer") from None
        if isinstance(error, (http.client.HTTPException, OSError)):
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ConnectionLost(f"the connection to {self._url} broke: {reason}") from None


def _refusal(address: Address, response: http.client.HTTPResponse) -> ClientError:
    body = response.read(1_000_000).decode("utf-8", "replace")
    try:
        error = json.loads(body)["error"]
        code, message, details = str(error["code"]), str(error["message"]), error.get("details")
    except (ValueError, KeyError, TypeError, AttributeError):
        code, details = f"http_{response.status}", None
        message = f"{address.url} answered {response.status} {response.reason}, which is not how a gateway answers"
    if response.status == 401:
        if not address.token:
            message = f"{address.url} wants a token: set FARHAND_TOKEN (`farhand token show` prints the owner's there)"
        elif address.home is not None and not os.environ.get("FARHAND_TOKEN"):
            message = f"{address.url} does not know the token in {address.home / TOKEN_FILE}"
        else:
            message = f"{address.url} does not know this token; check FARHAND_TOKEN"
    return ClientError(code, message, details)


def _read_pieces(response: http.client.HTTPResponse, worded: _Worded) -> Iterator[bytes]:
    left = int(response.headers.get("Content-Length", 0))
    while left:
        with worded:
            piece = response.read1(1 << 20)
            if not piece:
                raise http.client.IncompleteRead(b"", left)
        left -= len(piece)
        yield piece


def _read_events(response: http.client.HTTPResponse, worded: _Worded) -> Iterator[Any]:
    """Yield the data of each server-sent event."""
    return (read_json(data) for _, data in _read_named_events(response, worded))


def _read_named_events(response: http.client.HTTPResponse, worded: _Worded) -> Iterator[tuple[str, str]]:
    """Yield the name and data of each server-sent event."""
    name, data = "message", list[bytes]()
    while True:
        with worded:
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
                yield name, b"\n".join(data).decode("utf-8", "replace")
            name, data = "message", []


# -- the options of every client command ------------------------------------------------------------------


def client_command(function: Function) -> Function:
    """Give a command --json, --home and --url, and pass it `client` and `as_json`.

    A subcommand takes over what was given to its group.
    """

    @functools.wraps(function)
    def run(*args: Any, home: str | None, url: str | None, as_json: bool, **options: Any) -> Any:
        parent = click.get_current_context().parent
        outer = parent.params if parent is not None else {}
        client = Client(home or outer.get("home"), url or outer.get("url"))
        return function(*args, client=client, as_json=as_json, **options)

    command: Any = run
    for option in (
        click.option("--url", metavar="URL", help="Address of the gateway.  [FARHAND_URL, with FARHAND_TOKEN]"),
        click.option(
            "--home", type=click.Path(file_okay=False), help="Home of the gateway.  [FARHAND_HOME, ~/.farhand]"
        ),
        json_option(),
    ):
        command = option(command)
    result: Function = command
    return result
