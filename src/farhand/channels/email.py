"""Connect to e-mail: receive over IMAP with imap-tools (the extra `email`), send over SMTP with the standard library.

Both run in a thread. Servers that support IDLE push new mail; others are polled.

From can be forged. Senders therefore get no tools, whatever the settings say, unless `authserv` names the mail server
whose `Authentication-Results` are trusted; mail without `dmarc=pass` is then rejected.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.message
import email.policy
import email.utils
import hashlib
import html.parser
import imaplib
import logging
import re
import smtplib
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeVar

from farhand.channels.library import load
from farhand.gateway.messaging.channel import (
    Attachment,
    ChannelKind,
    ChannelSettings,
    Incoming,
    Outgoing,
    Take,
    TryLater,
    Undeliverable,
    Unsure,
)
from farhand.protocol.errors import ToolError
from farhand.store.tables.outbox import Place

log = logging.getLogger(__name__)

T = TypeVar("T")

SECONDS: Final = 30.0
LONGEST_WAIT: Final = 60.0
# How long to wait in IDLE before checking anyway: middleboxes may drop an idle connection.
IDLE_SECONDS: Final = 240.0
LARGEST_MAIL: Final = 30 * 1024 * 1024
MAX_SUBJECTS: Final = 1000
DEFAULT_SUBJECT: Final = "A message from your agent"

Security = Literal["tls", "starttls", "none"]


class EmailSettings(ChannelSettings, kw_only=True):
    # The agent's own address.
    address: str
    # Defaults to the address.
    user: str = ""
    password: str = ""
    imap_host: str
    imap_port: int = 993
    imap_security: Security = "tls"
    # Defaults to the IMAP host.
    smtp_host: str = ""
    smtp_port: int = 465
    smtp_security: Security = "tls"
    mailbox: str = "INBOX"
    # How often to poll a server without IDLE.
    poll_seconds: float = 15.0
    # The name in `Authentication-Results` of the server that checks senders.
    authserv: str = ""
    # CA certificates to trust instead of the system's.
    ca_file: str = ""


class EmailChannel:
    longest_text = 100_000
    files_apart = False
    repeatable = False
    trouble = ""

    def __init__(self, settings: EmailSettings) -> None:
        self.settings = settings
        self._user = settings.user or settings.address
        self._smtp_host = settings.smtp_host or settings.imap_host
        self._subjects: OrderedDict[str, str] = OrderedDict()

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        wait = 1.0
        while True:
            try:
                async with _Mailbox(self.settings, self._user) as mailbox:
                    while True:
                        for number, raw in await mailbox.unseen():
                            await self._take(take, raw)
                            await mailbox.mark_seen(number)
                        wait, self.trouble = 1.0, ""
                        await mailbox.news()
            except (OSError, imaplib.IMAP4.error, _Unusable, ToolError) as error:
                self.trouble = str(error)
                log.warning("failed to read the mail of %s; retrying in %g s: %s", self.settings.address, wait, error)
            await asyncio.sleep(wait)
            wait = min(LONGEST_WAIT, wait * 2)

    async def _take(self, take: Take, raw: bytes) -> None:
        incoming = read_mail(raw, own=self.settings.address, authserv=self.settings.authserv)
        if incoming is None:
            return
        message, subject = incoming
        self._subjects[message.id] = subject
        while len(self._subjects) > MAX_SUBJECTS:
            self._subjects.popitem(last=False)
        await take(message)

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        mail = self._mail(message)
        await asyncio.to_thread(self._submit, mail, message.place.peer)
        return str(mail["Message-ID"])

    def _mail(self, message: Outgoing) -> email.message.EmailMessage:
        recipient = message.place.peer
        if not re.fullmatch(r"[^\s<>,;:@]+@[^\s<>,;:@]+", recipient):
            raise Undeliverable(f"{recipient!r} is not an e-mail address")
        mail = email.message.EmailMessage(policy=email.policy.SMTP)
        mail["From"] = self.settings.address
        mail["To"] = recipient
        subject = self._subjects.get(message.reply_to or "", "")
        mail["Subject"] = f"Re: {subject}" if subject else DEFAULT_SUBJECT
        mail["Date"] = email.utils.formatdate()
        domain = self.settings.address.rpartition("@")[2] or "localhost"
        mail["Message-ID"] = f"<{hashlib.sha256(message.id.encode()).hexdigest()[:32]}@{domain}>"
        if message.reply_to and re.fullmatch(r"<[^<>\s]+>", message.reply_to):
            mail["In-Reply-To"] = mail["References"] = message.reply_to
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content(message.text)
        for file in message.attachments:
            main, _, sub = file.content_type.partition(";")[0].partition("/")
            mail.add_attachment(
                file.data, maintype=main or "application", subtype=sub or "octet-stream", filename=file.name
            )
        return mail

    def _submit(self, mail: email.message.EmailMessage, recipient: str) -> None:
        settings = self.settings
        try:
            server = self._connect()
        except (OSError, smtplib.SMTPException) as error:
            raise TryLater(f"the mail server cannot be reached: {error}") from None
        with contextlib.ExitStack() as stack:
            stack.callback(_quit, server)
            try:
                if settings.password:
                    server.login(self._user, settings.password)
                server.ehlo_or_helo_if_needed()
                _accepted(server.mail(settings.address), "sender")
                _accepted(server.rcpt(recipient), "recipient")
            except (OSError, smtplib.SMTPException) as error:  # the server has not accepted anything yet
                raise TryLater(f"the mail server did not accept the message: {error}") from None
            try:
                answer = server.data(mail.as_bytes())
            except smtplib.SMTPDataError as error:
                answer = (error.smtp_code, error.smtp_error if isinstance(error.smtp_error, bytes) else b"")
            except (OSError, smtplib.SMTPException) as error:
                raise Unsure(f"the mail server disconnected while it received the message: {error}") from None
            _accepted(answer, "message")

    def _connect(self) -> smtplib.SMTP:
        settings = self.settings
        if settings.smtp_security == "tls":
            return smtplib.SMTP_SSL(self._smtp_host, settings.smtp_port, timeout=SECONDS, context=_trust(settings))
        server = smtplib.SMTP(self._smtp_host, settings.smtp_port, timeout=SECONDS)
        if settings.smtp_security == "starttls":
            server.starttls(context=_trust(settings))
        return server

    async def typing(self, place: Place) -> None:  # noqa: ARG002
        return None

    async def close(self) -> None:
        return None


class _Unusable(Exception):
    """Report that the library failed to open or read the mailbox."""


class _Mailbox:
    """Hold an open mailbox in a thread. Every method may raise OSError, imaplib's errors and _Unusable."""

    def __init__(self, settings: EmailSettings, user: str) -> None:
        self._settings = settings
        self._user = user
        self._library: Any = None
        self._box: Any = None

    async def __aenter__(self) -> _Mailbox:
        self._library = await load("imap_tools", "imap_tools.errors")
        self._box = await self._do(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        box, self._box = self._box, None
        if box is not None:
            with contextlib.suppress(OSError, imaplib.IMAP4.error):
                box.client.shutdown()  # this also wakes a thread that waits in IDLE

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except self._library.errors.ImapToolsError as error:
            raise _Unusable(str(error)) from None

    def _open(self) -> Any:
        settings, library = self._settings, self._library
        where = (settings.imap_host, settings.imap_port)
        match settings.imap_security:
            case "tls":
                box = library.MailBox(*where, timeout=SECONDS, ssl_context=_trust(settings))
            case "starttls":
                box = library.MailBoxStartTls(*where, timeout=SECONDS, ssl_context=_trust(settings))
            case _:
                box = library.MailBoxUnencrypted(*where, timeout=SECONDS)
        return box.login(self._user, settings.password, initial_folder=settings.mailbox)

    async def news(self) -> None:
        """Return when new mail may have arrived."""
        if "IDLE" in self._box.client.capabilities:
            await self._do(self._listen)
        else:
            await asyncio.sleep(self._settings.poll_seconds)

    def _listen(self) -> None:
        _, exists = self._box.client.response("EXISTS")
        if exists != [None]:
            return  # the notice came with the server's last response and will not be repeated
        with self._box.idle as idle:
            if not self._said_more():
                idle.poll(IDLE_SECONDS)

    def _said_more(self) -> bool:
        """Return whether the server sent data together with its last line.

        The library checks only the socket, but that data has already been read from it.
        """
        client = self._box.client
        lines = getattr(client, "_file", None) or client.file
        patience = client.sock.gettimeout()
        client.sock.settimeout(0)
        try:
            return bool(lines.peek(1))
        except OSError:  # no data
            return False
        finally:
            client.sock.settimeout(patience)

    async def unseen(self) -> list[tuple[str, bytes]]:
        """Return the numbers and contents of unread mails, oldest first."""
        return await self._do(lambda: list(self._unseen()))

    def _unseen(self) -> Iterator[tuple[str, bytes]]:
        client = self._box.client
        client.response("EXISTS")  # later notices announce new mail
        for number in self._box.uids("UNSEEN"):
            _, sizes = client.uid("FETCH", number, "(RFC822.SIZE)")
            size = re.search(rb"RFC822.SIZE (\d+)", sizes[0] if isinstance(sizes[0], bytes) else b"")
            part = "BODY.PEEK[]" if size is None or int(size[1]) <= LARGEST_MAIL else "BODY.PEEK[HEADER]"
            _, data = client.uid("FETCH", number, f"({part})")
            if data and isinstance(data[0], tuple):
                yield number, data[0][1]

    async def mark_seen(self, number: str) -> None:
        await self._do(lambda: self._box.flag(number, [self._library.MailMessageFlags.SEEN], True))


def read_mail(raw: bytes, *, own: str, authserv: str = "") -> tuple[Incoming, str] | None:
    """Convert a mail to a message and its subject.

    Returns None for automatic mail, mail whose sender is not authenticated, and mail that cannot be read.
    """
    try:
        return _read_mail(raw, own, authserv)
    except Exception as error:
        # The library raises various errors for malformed mail. If one were passed on, the mail would be fetched again
        # and again, and hold up all others.
        log.warning("skipped a mail that cannot be read: %s", type(error).__name__)
        return None


def _read_mail(raw: bytes, own: str, authserv: str) -> tuple[Incoming, str] | None:
    mail = email.message_from_bytes(raw, policy=email.policy.default)
    name, sender = email.utils.parseaddr(str(mail.get("From", "")))
    sender = sender.lower()
    if "@" not in sender or sender == own.lower() or len(mail.get_all("From", [])) != 1 or _is_automatic(mail, sender):
        return None
    if authserv and not _vouched(mail, authserv):
        log.warning("rejected a mail that claims to be from %s: %s did not authenticate the sender", sender, authserv)
        return None
    subject = " ".join(str(mail.get("Subject", "")).split())
    text = _text(mail)
    identity = str(mail.get("Message-ID", "")).strip() or f"<{hashlib.sha256(raw).hexdigest()[:32]}@nowhere>"
    incoming = Incoming(
        id=identity,
        peer=sender,
        sender=sender,
        sender_name=name,
        text=f"Subject: {subject}\n\n{text}" if subject and not text.startswith("/") else text or subject,
        attachments=tuple(_attachments(mail)),
        answers=identity,
        trusted=bool(authserv),
    )
    return incoming, re.sub(r"^(?:re:\s*)+", "", subject, flags=re.IGNORECASE)


def _is_automatic(mail: email.message.EmailMessage, sender: str) -> bool:
    """Return whether a program sent the mail; replying to it could cause an endless mail loop."""
    automatic = str(mail.get("Auto-Submitted", "no")).split(";")[0].strip().lower()
    bulk = str(mail.get("Precedence", "")).lower() in ("bulk", "junk", "list")
    daemon = sender.partition("@")[0] in ("mailer-daemon", "postmaster", "no-reply", "noreply")
    return automatic != "no" or bulk or daemon or "List-Id" in mail or str(mail.get("Return-Path", "")).strip() == "<>"


# Limits how much of a header is parsed: each open parenthesis rescans the rest.
MOST_RESULTS = 4096
# Limits how many characters of HTML are parsed: the parser takes quadratic time for some input.
MOST_MARKUP = 256 * 1024


def _vouched(mail: email.message.EmailMessage, authserv: str) -> bool:
    """Return whether `authserv` authenticated the sender.

    Only the topmost header counts: the sender may have added the ones below it.
    """
    verdicts = mail.get_all("Authentication-Results", [])
    first = str(verdicts[0]) if verdicts else ""
    server, _, results = first[:MOST_RESULTS].partition(";")
    named = server.split()[:1] == [authserv]
    return named and re.search(r"(?:^|[;\s])dmarc=pass\b", re.sub(r"\([^)]*\)", "", results)) is not None


def _text(mail: email.message.EmailMessage) -> str:
    body = mail.get_body(("plain", "html"))
    if body is None:
        return ""
    try:
        content = body.get_content()
    except (LookupError, ValueError):
        content = bytes(body.get_payload(decode=True) or b"").decode("utf-8", "replace")
    text = str(content)
    if body.get_content_subtype() == "html":
        text = _plain(text)
    return text.replace("\r\n", "\n").strip()


def _attachments(mail: email.message.EmailMessage) -> Iterator[Attachment]:
    for part in mail.iter_attachments():
        payload = part.get_payload(decode=True)
        if isinstance(payload, bytes) and payload:
            yield Attachment(part.get_filename() or "file", part.get_content_type(), payload)


def _plain(markup: str) -> str:
    reader = _Reader()
    with contextlib.suppress(AssertionError):  # the parser raises this for some malformed declarations
        reader.feed(markup[:MOST_MARKUP])
    return re.sub(r"\n{3,}", "\n\n", "".join(reader.parts))


class _Reader(html.parser.HTMLParser):
    """Extract the text of an HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self._hidden += tag in ("script", "style", "head")
        if tag in ("br", "p", "div", "tr", "li"):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "head") and self._hidden > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def _accepted(answer: tuple[int, bytes], what: str) -> None:
    code, said = answer
    if 200 <= code < 400:
        return
    text = f"the mail server rejected the {what}: {code} {said.decode('utf-8', 'replace')[:300]}"
    raise Undeliverable(text) if code >= 500 else TryLater(text)


def _quit(server: smtplib.SMTP) -> None:
    with contextlib.suppress(OSError, smtplib.SMTPException):
        server.quit()


def _trust(settings: EmailSettings) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=settings.ca_file or None)


CHANNEL = ChannelKind(EmailSettings, EmailChannel)
