"""A real mail server from Debian: Dovecot for IMAP and submission, with TLS and passwords, before OpenSMTPD.

Both run as root in the foreground, on ports and folders of their own. OpenSMTPD has fixed paths for its spool and
socket, so it runs in a mount namespace of its own.
"""

from __future__ import annotations

import email.message
import email.policy
import email.utils
import imaplib
import os
import shutil
import signal
import smtplib
import socket
import ssl
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import trustme

from tests.support.harness import free_port, wait_until

PROGRAMS = ("smtpd", "dovecot", "unshare")
DOMAIN = "example.org"
PASSWORD = "mail-password"
# The system's user who owns the mailboxes.
OWNER = "mail"


def missing() -> str | None:
    """Why no mail server can run here; None when one can."""
    if os.geteuid() != 0:
        return "a mail server takes root"
    absent = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    return f"not installed: {', '.join(absent)}; run scripts/install-test-servers" if absent else None


class MailServer:
    """Accepts mail for every address at example.org, and lets each read its own; use as a context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="farhand-mail-"))
        self.folder.chmod(0o755)
        self.smtp_port, self.imap_port, self._relay_port = free_port(), free_port(), free_port()
        self.ca_file = self.folder / "ca.pem"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> MailServer:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        chain = self.folder / "cert.pem"
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(str(chain), append=True)
        certificate.private_key_pem.write_to_path(str(self.folder / "key.pem"))
        (self.folder / "key.pem").chmod(0o600)
        (self.folder / "boxes").mkdir()
        shutil.chown(self.folder / "boxes", OWNER, OWNER)
        self.start_smtp()
        self._start_dovecot()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _end(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_smtp(self) -> None:
        folder = self.folder
        (folder / "smtpd.conf").write_text(
            f"""table people {{ "@{DOMAIN}" = "{OWNER}" }}
listen on 127.0.0.1 port {self._relay_port}
action "keep" maildir "{folder}/boxes/%{{rcpt.user}}" virtual <people>
match from any for domain "{DOMAIN}" action "keep"
"""
        )
        script = (
            "mount --make-rprivate / && mount -t tmpfs tmpfs /var/spool && mkdir -m 711 /var/spool/smtpd && "
            f"mount -t tmpfs tmpfs /run && exec /usr/sbin/smtpd -d -f {folder}/smtpd.conf"
        )
        self.smtp = self._run(["unshare", "-m", "sh", "-c", script], "smtpd.log")
        self._wait(self._relay_port, self.smtp, "smtpd.log")

    def stop_smtp(self) -> None:
        _end(self.smtp)

    def _start_dovecot(self) -> None:
        folder = self.folder
        (folder / "run").mkdir()
        (folder / "dovecot.conf").write_text(
            f"""protocols = imap submission
listen = 127.0.0.1
base_dir = {folder}/run
state_dir = {folder}/run
log_path = {folder}/dovecot.log
ssl = required
ssl_cert = <{folder}/cert.pem
ssl_key = <{folder}/key.pem
mail_location = maildir:{folder}/boxes/%n
mail_uid = {OWNER}
mail_gid = {OWNER}
first_valid_uid = 1
first_valid_gid = 1
hostname = localhost
submission_relay_host = 127.0.0.1
submission_relay_port = {self._relay_port}
submission_relay_trusted = no
passdb {{
  driver = static
  args = password={PASSWORD}
}}
userdb {{
  driver = static
  args = uid={OWNER} gid={OWNER} home={folder}/boxes/%n
}}
service imap-login {{
  chroot =
  inet_listener imap {{
    port = 0
  }}
  inet_listener imaps {{
    port = {self.imap_port}
    ssl = yes
  }}
}}
service submission-login {{
  chroot =
  inet_listener submission {{
    port = 0
  }}
  inet_listener submissions {{
    port = {self.smtp_port}
    ssl = yes
  }}
}}
"""
        )
        process = self._run(["/usr/sbin/dovecot", "-F", "-c", str(folder / "dovecot.conf")], "dovecot.out")
        for port in (self.imap_port, self.smtp_port):
            self._wait(port, process, "dovecot.log")

    def _run(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        self._processes.append(process)
        return process

    def _wait(self, port: int, process: subprocess.Popen[bytes], log: str) -> None:
        def listens() -> bool:
            if process.poll() is not None:
                said = self.folder / log
                raise AssertionError(f"{log}: {said.read_text()[-2000:] if said.exists() else process.returncode}")
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, 30, f"the mail server on port {port}")

    # -- as a person would -------------------------------------------------------------------------------

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))

    def mail(self, sender: str, text: str, subject: str = "hello", **headers: str) -> email.message.EmailMessage:
        """Write to the agent."""
        mail = email.message.EmailMessage()
        mail["From"], mail["To"], mail["Subject"] = sender, f"agent@{DOMAIN}", subject
        mail["Message-ID"] = email.utils.make_msgid(domain=DOMAIN)
        for name, value in headers.items():
            mail[name.replace("_", "-")] = value
        mail.set_content(text)
        return self.hand_over(mail)

    def hand_over(self, mail: email.message.EmailMessage) -> email.message.EmailMessage:
        with smtplib.SMTP_SSL("localhost", self.smtp_port, timeout=20, context=self.trust) as server:
            server.login(f"somebody@{DOMAIN}", PASSWORD)
            server.send_message(mail)
        return mail

    def inbox(self, user: str) -> list[Any]:
        """Return the mails of an address, oldest first."""
        imap = imaplib.IMAP4_SSL("localhost", self.imap_port, ssl_context=self.trust, timeout=20)
        try:
            imap.login(f"{user}@{DOMAIN}", PASSWORD)
            imap.select("INBOX", readonly=True)
            _, found = imap.search(None, "ALL")
            mails = []
            for number in found[0].split():
                _, data = imap.fetch(number.decode(), "(BODY.PEEK[])")
                # Others may read the box at the same time: the server then adds lines about their changes.
                content = [part[1] for part in data if isinstance(part, tuple)]
                mails += [email.message_from_bytes(raw, policy=email.policy.default) for raw in content]
            return mails
        finally:
            imap.logout()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
