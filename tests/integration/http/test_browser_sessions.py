"""Console sessions: two secrets, an end, and an owner who can see and end them."""

from __future__ import annotations

import http.client
import http.cookiejar
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from farhand.api.server.browser_sessions import BrowserSessions, SessionLimits
from farhand.gateway.access.credentials import OWNER, Credentials, NodeTokens
from farhand.store.sqlite.store import SqliteStore
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, wait_until

CALL = {"tool": "gsv__ListFiles", "args": {}}


def status(gateway: GatewayProcess, headers: dict[str, str], method: str = "GET", path: str = "/v1/nodes") -> int:
    return gateway.request(method, path, None if method == "GET" else {}, token=None, headers=headers).status


def sessions(gateway: GatewayProcess) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = gateway.get("/v1/console/sessions")["sessions"]
    return listed


def test_the_cookie_alone_does_nothing(shared_gateway: GatewayProcess) -> None:
    both = shared_gateway.sign_in()
    other = shared_gateway.sign_in()
    assert status(shared_gateway, both) == 200
    wrong = [
        {"Cookie": both["Cookie"]},
        {"X-Farhand-Page": both["X-Farhand-Page"]},
        {**both, "X-Farhand-Page": other["X-Farhand-Page"]},
        {**both, "X-Farhand-Page": ""},
        {**both, "X-Farhand-Page": "\xe9"},
        {**both, "X-Farhand-Page": both["Cookie"].partition("=")[2]},
        {**both, "Cookie": f"{both['Cookie']}x"},
    ]
    for headers in wrong:
        for method, path in (
            ("GET", "/v1/nodes"),
            ("GET", "/v1/events"),
            ("POST", "/v1/tools/invoke"),
            ("POST", "/mcp"),
        ):
            assert status(shared_gateway, headers, method, path) == 401, (headers, path)
        assert status(shared_gateway, headers, "POST", "/v1/signin") == 401
        assert status(shared_gateway, headers, "POST", "/v1/signout") == 401
    assert status(shared_gateway, both) == 200


def test_a_hostile_server_on_another_port_gets_the_cookie_and_no_more(shared_gateway: GatewayProcess) -> None:
    """Cookies ignore ports, so it is sent there; whatever headers that server forges, it cannot act with it."""
    jar = http.cookiejar.CookieJar()

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar), Stay())
    path = shared_gateway.request("POST", "/v1/signin", {}).json()["path"]
    with pytest.raises(urllib.error.HTTPError) as redirected:
        opener.open(shared_gateway.url + path)
    redirected.value.close()
    elsewhere = urllib.request.Request("http://127.0.0.1:9/")
    jar.add_cookie_header(elsewhere)
    stolen = elsewhere.get_header("Cookie")
    assert stolen, "the cookie is sent to other ports"
    forged = {"Cookie": stolen, "Origin": shared_gateway.url, "Sec-Fetch-Site": "same-origin"}
    assert status(shared_gateway, forged) == 401
    assert status(shared_gateway, forged, "POST", "/v1/signin") == 401


def test_a_session_survives_a_restart_and_is_stored_hashed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    gateway = GatewayProcess(home)
    with gateway:
        headers = gateway.sign_in()
        assert status(gateway, headers) == 200
    with gateway:
        assert status(gateway, headers) == 200
        [session] = sessions(gateway)
        assert session["address"] == "127.0.0.1" and session["expires_at"] > session["last_used_at"]
    secrets = [headers["Cookie"].partition("=")[2], headers["X-Farhand-Page"]]
    for file in home.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert not any(secret.encode() in data for secret in secrets), file


def test_replacing_the_owner_token_ends_every_session(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    with gateway:
        headers = gateway.sign_in()
    (tmp_path / "home" / "token").unlink()
    with gateway:
        assert status(gateway, headers) == 401
        assert sessions(gateway) == []


def test_sessions_are_listed_and_ended(gateway: GatewayProcess) -> None:
    first, second, third = (gateway.sign_in() for _ in range(3))
    mine = gateway.request("GET", "/v1/console/sessions", token=None, headers=second).json()["sessions"]
    assert len(mine) == 3 and [session["current"] for session in mine] == [True, False, False]
    assert gateway.request("POST", "/v1/signout", {}, token=None, headers=second).status == 200
    assert status(gateway, second) == 401 and status(gateway, first) == 200
    assert gateway.request("POST", "/v1/signout", {}).status == 400
    mine = gateway.request("GET", "/v1/console/sessions", token=None, headers=first).json()["sessions"]
    [current] = [session["id"] for session in mine if session["current"]]
    assert gateway.request("DELETE", f"/v1/console/sessions/{current}").json() == {"ended": 1}
    assert gateway.request("DELETE", f"/v1/console/sessions/{current}").status == 404
    assert status(gateway, first) == 401 and status(gateway, third) == 200
    gateway.stop()
    gateway.start()
    assert status(gateway, first) == 401 and status(gateway, third) == 200
    assert gateway.request("DELETE", "/v1/console/sessions").json() == {"ended": 1}
    assert status(gateway, third) == 401


def test_a_narrower_token_may_neither_see_nor_end_sessions(shared_gateway: GatewayProcess) -> None:
    token = shared_gateway.request("POST", "/v1/tokens", {"label": "x"}).json()["token"]
    shared_gateway.sign_in()
    assert shared_gateway.request("GET", "/v1/console/sessions", token=token).status == 403
    assert shared_gateway.request("DELETE", "/v1/console/sessions", token=token).status == 403
    assert shared_gateway.request("POST", "/v1/signin", {}, token=token).status == 403


def test_a_stream_ends_with_its_session(shared_gateway: GatewayProcess) -> None:
    headers = shared_gateway.sign_in()
    connection = http.client.HTTPConnection("127.0.0.1", shared_gateway.port, timeout=30)
    connection.request("GET", "/v1/events", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert shared_gateway.request("POST", "/v1/signout", {}, token=None, headers=headers).status == 200
    answer.read()  # returns: the gateway has ended the stream
    connection.close()


def test_a_session_ends_when_it_expires(tmp_path: Path) -> None:
    env: dict[str, str | None] = {"FARHAND_CONSOLE_MAX_DAYS": str(2 / 86_400)}
    with GatewayProcess(tmp_path / "home", env=env) as gateway:
        headers = gateway.sign_in()
        wait_until(lambda: status(gateway, headers) == 401, what="the session to end")
        assert sessions(gateway) == []


def test_a_session_ends_when_it_is_not_used(tmp_path: Path) -> None:
    import asyncio

    now = 1_000_000

    async def run() -> None:
        nonlocal now
        database = SqliteStore.open(tmp_path / "x.db")

        def opened(owner: str = "owner") -> BrowserSessions:
            limits = SessionLimits(idle_ms=1000, total_ms=5000)
            credentials = Credentials(owner, [], NodeTokens(), open=False)
            return BrowserSessions(database, tmp_path, credentials, limits, name="1", secure=False, clock=lambda: now)

        kept = opened()
        signed_in = await kept.redeem(kept.new_code(OWNER.id), "127.0.0.1", "Browser\x1b[31m\n/1.0")
        assert signed_in is not None
        cookie = signed_in.cookie.partition("=")[2].partition(";")[0]
        for _ in range(5):
            now += 900
            assert kept.recognise(cookie, signed_in.page_secret) is not None, "a use prolongs it"
        [(session, _, ends_at)] = kept.listed()
        assert session.user_agent == "Browser[31m/1.0" and ends_at == 1_000_000 + 5000
        assert kept.recognise(cookie, "wrong") is None
        await database.write(lambda _: None)
        assert opened().recognise(cookie, signed_in.page_secret) is not None
        now += 600
        assert kept.recognise(cookie, signed_in.page_secret) is None, "at most this long"
        assert opened().listed() == []

        again = opened()
        signed_in = await again.redeem(again.new_code(OWNER.id), "", "")
        assert signed_in is not None
        cookie = signed_in.cookie.partition("=")[2].partition(";")[0]
        now += 1000
        assert again.recognise(cookie, signed_in.page_secret) is None, "unused for too long"
        assert again.listed() == []
        await database.close()

    asyncio.run(run())


def test_the_command_line_makes_links_and_ends_sessions(shared_gateway: GatewayProcess) -> None:
    def farhand(*words: str) -> Any:
        return run_process([*FARHAND, "console", *words, "--home", str(shared_gateway.home)], env=os.environ)

    link = farhand("--print").stdout.strip()
    assert link.startswith(f"{shared_gateway.url}/signin?code=")
    answer = shared_gateway.request("GET", link.removeprefix(shared_gateway.url), token=None)
    assert answer.status == 303
    assert json.loads(farhand("--json").stdout)["url"].startswith(f"{shared_gateway.url}/signin?code=")
    shown = json.loads(farhand("sessions", "--json").stdout)["sessions"]
    assert shown[0]["id"] in farhand("sessions").stdout
    assert farhand("end", shown[0]["id"]).stdout.strip() == f"ended: {shown[0]['id']}"
    assert farhand("end", "console-nothing").returncode == 1
    assert farhand("end").returncode == 2
    assert farhand("end", "--all").returncode == 0
    assert sessions(shared_gateway) == []


@pytest.mark.parametrize(
    ("env", "printed"),
    [
        ({}, True),
        ({"INVOCATION_ID": "0123456789abcdef"}, False),
        ({"JOURNAL_STREAM": "8:1"}, False),
        ({"XPC_SERVICE_NAME": "com.example.farhand"}, False),
        ({"XPC_SERVICE_NAME": "0"}, True),
        # As in a program that a service started: its output is read by that program.
        ({"INVOCATION_ID": "0123456789abcdef", "SYSTEMD_EXEC_PID": "1"}, True),
    ],
)
def test_the_link_of_up_does_not_go_into_the_log_of_a_service(
    tmp_path: Path, env: dict[str, str | None], printed: bool
) -> None:
    clean = dict.fromkeys(("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "XPC_SERVICE_NAME"))
    gateway = GatewayProcess(tmp_path / "home", "--no-node", command="up", env={**clean, **env})
    with gateway:
        assert gateway.process is not None and gateway.process.stdout is not None
        line = gateway.process.stdout.readline()
        assert ("/signin?code=" in line) is printed, line
        assert printed or "farhand console" in line
