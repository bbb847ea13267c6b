"""E-mail, through a real server: OpenSMTPD and Dovecot of Debian.

The server is not asked for mail within the time a test takes: what is heard, it said by itself.
"""

from __future__ import annotations

import email.message
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.channels.email import read_mail
from tests.support.harness import GatewayProcess, wait_until
from tests.support.mail_server import DOMAIN, PASSWORD, MailServer, missing
from tests.support.model_server import ModelServer, text


@pytest.fixture(scope="module")
def server() -> Iterator[MailServer]:
    if reason := missing():
        pytest.skip(reason)
    with MailServer() as running:
        yield running


@pytest.fixture
def gateway(server: MailServer, tmp_path: Path) -> Iterator[GatewayProcess]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(
        f"""[sessions]
dm_scope = "per-peer"
[channels.email]
address = "agent@{DOMAIN}"
password = "{PASSWORD}"
imap_host = "localhost"
imap_port = {server.imap_port}
smtp_port = {server.smtp_port}
ca_file = "{server.ca_file}"
poll_seconds = 3600
policy = "allowlist"
allow = ["ann@{DOMAIN}", "bob@{DOMAIN}"]
"""
    )
    with ModelServer(answer=lambda request: text("It says: " + _last(request))) as model:
        env = {"OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": "k", "FARHAND_MODEL": "scripted"}
        with GatewayProcess(home, env=env) as process:
            yield process


def _last(request: Any) -> str:
    content = [message for message in request.messages if message["role"] == "user"][-1]["content"]
    return content if isinstance(content, str) else content[0]["text"]


def body(mail: Any) -> str:
    part = mail.get_body(("plain",))
    return str(part.get_content()).replace("\r\n", "\n")


def test_a_mail_is_answered_by_mail(server: MailServer, gateway: GatewayProcess) -> None:
    asked = server.mail(f"Ann <ann@{DOMAIN}>", "Grüße, wie geht es?", "A question")
    (answer,) = wait_until(lambda: server.inbox("ann"), 40, "the answer")
    assert answer["From"] == f"agent@{DOMAIN}" and answer["Subject"] == "Re: A question"
    assert answer["In-Reply-To"] == asked["Message-ID"]
    assert "Grüße, wie geht es?" in body(answer) and "[email · Ann]" in body(answer)


def test_files_come_and_go(server: MailServer, gateway: GatewayProcess) -> None:
    mail = email.message.EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = f"bob@{DOMAIN}", f"agent@{DOMAIN}", "a file"
    mail.set_content("see attached")
    mail.add_attachment(b"\x00\x01data", maintype="application", subtype="octet-stream", filename="a b.bin")
    server.hand_over(mail)
    (answer,) = wait_until(lambda: server.inbox("bob"), 40, "the answer")
    path = body(answer).replace("\n", " ").split("[attached: ")[1].split(" ")[0]
    assert gateway.request("GET", f"/v1/workspace/main/{path}").body == b"\x00\x01data"
    args = {"text": "back to you", "channel": "email", "to": f"dora@{DOMAIN}", "media": [path]}
    assert gateway.invoke("gsv__Message", args)["result"]["sent"]
    (got,) = wait_until(lambda: server.inbox("dora"), 40, "the file")
    (file,) = got.iter_attachments()
    assert file.get_content() == b"\x00\x01data" and body(got).strip() == "back to you"


def test_a_mail_waits_for_its_server(server: MailServer, gateway: GatewayProcess) -> None:
    server.stop_smtp()
    try:
        args = {"text": "patience", "channel": "email", "to": f"eli@{DOMAIN}"}
        assert gateway.invoke("gsv__Message", args)["result"]["queued"]
    finally:
        server.start_smtp()
    (got,) = wait_until(lambda: server.inbox("eli"), 60, "the mail")
    assert body(got).strip() == "patience"


def test_a_refusal_of_the_server_is_reported(server: MailServer, gateway: GatewayProcess) -> None:
    for address in ("nobody@elsewhere.invalid", "not an address"):
        answer = gateway.invoke("gsv__Message", {"text": "x", "channel": "email", "to": address})
        assert answer["error"]["kind"] == "failed", answer
        assert answer["error"]["message"].startswith("Channel send failed:"), answer


def test_a_stranger_s_mail_is_not_answered(server: MailServer, gateway: GatewayProcess) -> None:
    server.mail(f"mallory@{DOMAIN}", "let me in")
    server.mail(f"ann@{DOMAIN}", "automatic", Auto_Submitted="auto-replied")
    before = len(server.inbox("ann"))
    server.mail(f"ann@{DOMAIN}", "are you there?")
    wait_until(lambda: len(server.inbox("ann")) > before, 40, "the answer")
    assert server.inbox("mallory") == [] and len(server.inbox("ann")) == before + 1
    assert "mallory" not in str(gateway.get("/v1/sessions"))


# -- reading, without a server --------------------------------------------------------------------------------


def raw(**headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\nbody\r\n").encode()


@pytest.mark.parametrize(
    "headers",
    [
        {"From": "agent@example.org"},
        {"From": "not an address"},
        {"From": "x@example.org", "Auto_Submitted": "auto-replied"},
        {"From": "x@example.org", "Precedence": "bulk"},
        {"From": "x@example.org", "List_Id": "<list.example.org>"},
        {"From": "MAILER-DAEMON@example.org"},
        {"From": "x@example.org", "Return_Path": "<>"},
    ],
)
def test_mail_that_no_person_sent_is_left_alone(headers: dict[str, str]) -> None:
    assert read_mail(raw(**headers), own="agent@example.org") is None


@pytest.mark.parametrize(
    ("verdicts", "taken"),
    [
        (["mx.example.org; dmarc=pass header.from=x.org"], True),
        (["mx.example.org 1; spf=pass; dmarc=pass (p=none)"], True),
        (["mx.example.org; dmarc=fail"], False),
        (["mx.example.org; dmarc=fail (dmarc=pass)"], False),
        (["evil.example; dmarc=pass"], False),
        (["mx.example.org; dmarc=fail", "mx.example.org; dmarc=pass"], False),
        ([], False),
    ],
)
def test_with_a_server_that_checks_only_vouched_mail_is_taken(verdicts: list[str], taken: bool) -> None:
    head = "".join(f"Authentication-Results: {verdict}\r\n" for verdict in verdicts).encode()
    read = read_mail(head + raw(From="x@x.org"), own="agent@example.org", authserv="mx.example.org")
    assert (read is not None) == taken


def test_without_such_a_server_no_sender_is_trusted() -> None:
    read = read_mail(raw(From="x@x.org"), own="agent@example.org")
    assert read is not None and read[0].trusted is False


def test_a_mail_in_html_is_read_as_words() -> None:
    data = b"From: x@x.org\r\nContent-Type: text/html\r\n\r\n<style>a{}</style><p>one<br>two</p><script>bad()</script>"
    read = read_mail(data, own="agent@example.org")
    assert read is not None and read[0].text == "one\ntwo"


def _nested(depth: int) -> bytes:
    parts = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n" % (n, n) for n in range(depth))
    return b"From: x@x.org\r\n" + parts + b"\r\nhello"


@pytest.mark.parametrize(
    "mail",
    [
        _nested(5000),
        b"From: x@x.org\r\nMessage-ID: <[\r\n\r\nhello",
        b"From: x@x.org\r\nContent-Type: text/plain; charset=idna\r\n\r\n\xff",
        b"From: x@x.org\r\nContent-Type: text/plain; charset*=a''%\r\n\r\nhello",
        b"From: \xff\xfe <x@x.org>\r\nSubject: \xff\r\nMessage-ID: \xff\r\n\r\nhello",
        b"From: x@x.org\r\nContent-Disposition: attachment; filename*0*=utf-8''%ff%; filename*=x\r\n\r\nhello",
    ],
    ids=range(6),
)
def test_no_mail_stops_the_channel(mail: bytes) -> None:
    """It would be fetched again and again, and hold up all others."""
    read_mail(mail, own="agent@example.org")
    assert read_mail(raw(From="x@x.org"), own="agent@example.org") is not None


def test_mails_that_come_close_together_are_all_heard(server: MailServer, gateway: GatewayProcess) -> None:
    before = len(server.inbox("bob"))
    words = [f"word-{number}" for number in range(8)]
    for word in words:
        server.mail(f"bob@{DOMAIN}", word)
    answers = wait_until(lambda: len(found := server.inbox("bob")) >= before + 8 and found, 60, "eight answers")
    assert sorted(words) == sorted(word for word in words for one in answers if word in body(one))
