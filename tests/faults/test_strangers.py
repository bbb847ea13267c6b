"""Connections of strangers: half a request, none at all, thousands of them; and streams whose token has ended."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from farhand.api.server.connection_limits import (
    GRACE_SECONDS,
    HEAD_SECONDS,
    LOG_SECONDS,
    MAX_CONNECTIONS,
    MAX_OF_ADDRESS,
    ConnectionLimits,
)
from farhand.api.server.http import Problem
from farhand.api.server.throttle import ADDRESSES_KEPT, TOKENLESS_ALLOWED, Throttle
from tests.support.harness import GatewayProcess, wait_until

pytestmark = [pytest.mark.siege, pytest.mark.timeout(300)]
CROWD = 2000 if os.environ.get("FARHAND_SIEGE") == "long" else 300
# The number of descriptors of a gateway that has few.
SMALL = 512


class Caller:
    def __init__(self) -> None:
        self.out = False

    def drop(self) -> None:
        self.out = True


class Hours:
    """A clock, and what is to be done later by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self._later.append((self.now + seconds, do))

    def pass_by(self, seconds: float) -> None:
        end = self.now + seconds
        while due := sorted((entry for entry in self._later if entry[0] <= end), key=lambda entry: entry[0]):
            self._later.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = end


def test_the_connection_that_has_waited_longest_makes_room() -> None:
    hours = Hours()
    limits = ConnectionLimits(hours.later, hours)
    crowd = [Caller() for _ in range(3 * MAX_CONNECTIONS)]
    for one in crowd:
        limits.add(one, "127.0.0.1")
        hours.pass_by(0.1)
    hours.pass_by(2 * GRACE_SECONDS)
    assert len(limits) == MAX_CONNECTIONS
    assert [one.out for one in crowd] == [True] * (2 * MAX_CONNECTIONS) + [False] * MAX_CONNECTIONS
    for one in crowd:
        limits.remove(one)
    one_address = [Caller() for _ in range(3 * MAX_OF_ADDRESS)]
    for one in one_address:
        limits.add(one, "192.0.2.1")
        hours.pass_by(2)
    other = Caller()
    limits.add(other, "192.0.2.2")
    hours.pass_by(2)
    assert [one.out for one in one_address] == [True] * (2 * MAX_OF_ADDRESS) + [False] * MAX_OF_ADDRESS
    assert not other.out


def test_all_clients_that_reconnect_at_once_are_admitted() -> None:
    hours = Hours()
    limits = ConnectionLimits(hours.later, hours, room=10 * MAX_CONNECTIONS)
    crowd = [Caller() for _ in range(10 * MAX_CONNECTIONS)]
    for number, one in enumerate(crowd):
        limits.add(one, f"192.0.2.{number % 10}")
    hours.pass_by(0.9 * GRACE_SECONDS)
    assert not any(one.out for one in crowd), "a moment is granted to all"
    hours.pass_by(GRACE_SECONDS)
    assert len(limits) == MAX_CONNECTIONS, "and no longer, although no other client came"


def test_who_was_not_listened_to_has_another_moment() -> None:
    hours = Hours()
    limits = ConnectionLimits(hours.later, hours)
    for _ in range(2 * MAX_CONNECTIONS):
        limits.add(Caller(), "127.0.0.1")
    hours.now = 5.0  # the gateway was busy with something else all the while
    hours.pass_by(0.0)
    assert len(limits) == 2 * MAX_CONNECTIONS
    hours.pass_by(2 * GRACE_SECONDS)
    assert len(limits) == MAX_CONNECTIONS


def test_a_burst_is_no_larger_than_the_room_and_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    hours = Hours()
    limits = ConnectionLimits(hours.later, hours, room=400)
    friend = Caller()
    limits.add(friend, "192.0.2.200")
    for address, most in (("192.0.2.1", 100), ("192.0.2.2", 200), ("127.0.0.1", 399)):
        for _ in range(3000):
            limits.add(Caller(), address)
        assert len(limits) == 1 + most, "one address has a quarter of the room, this machine what is left"
    late = Caller()
    limits.add(late, "192.0.2.201")
    assert len(limits) == 400 and not friend.out and not late.out
    hours.pass_by(0.5)
    limits.remove(friend)
    limits.remove(late)
    hours.pass_by(LOG_SECONDS)
    assert not friend.out and not late.out and len(caplog.messages) == 1, "said once, not thousands of times"


def from_address(address: str) -> dict[str, Any]:
    return {"client": (address, 1), "headers": []}


def test_an_address_has_one_name_and_the_table_of_them_an_end() -> None:
    now = 0.0
    throttle = Throttle(lambda: now)
    for spelling in ("192.0.2.7", "::ffff:192.0.2.7"):
        for _ in range(5):
            throttle.check(from_address(spelling))
            throttle.failed(from_address(spelling))
    with pytest.raises(Problem, match="too many wrong tokens"):
        throttle.check(from_address("192.0.2.7"))
    for number in range(10):  # one network, ten addresses
        throttle.failed(from_address(f"2001:db8::{number:x}"))
    with pytest.raises(Problem):
        throttle.check(from_address("2001:db8::ffff"))
    throttle.check(from_address("2001:db8:0:1::1"))
    for number in range(ADDRESSES_KEPT + 10):
        throttle.failed(from_address(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"))
    assert len(throttle) <= ADDRESSES_KEPT
    now = 301.0
    throttle.check(from_address("2001:db8::1"))


def test_requests_without_a_token_have_a_separate_limit(gateway: GatewayProcess) -> None:
    """From behind a proxy, that is: this machine itself is not counted."""
    headers = {"X-Forwarded-For": "192.0.2.1"}
    line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    seen = []
    for _ in range(TOKENLESS_ALLOWED + 5):
        line.request("GET", "/v1/health", headers=headers)
        answer = line.getresponse()
        answer.read()
        seen.append(answer.status)
    line.close()
    assert seen == [401] * TOKENLESS_ALLOWED + [429] * 5
    assert gateway.request("GET", "/v1/health", headers=headers).status == 200, "who has a token is served"


def descriptors(gateway: GatewayProcess) -> int:
    assert gateway.process is not None
    return len(os.listdir(f"/proc/{gateway.process.pid}/fd"))


def test_p9_p10_strangers_that_send_nothing_or_half_a_request_are_disconnected(gateway: GatewayProcess) -> None:
    """They stay away from closing anything themselves; meanwhile the owner is served, and a stream goes on."""
    before = descriptors(gateway)
    stream = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    stream.request("GET", "/v1/events", headers={"Authorization": f"Bearer {gateway.token}"})
    answer = stream.getresponse()
    assert answer.status == 200
    crowd = []
    halves = [
        b"",
        b"GET / HT",
        b"POST /v1/pair HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
        b"\x16\x03",
    ]
    served = 0
    for number in range(CROWD):
        one = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
        crowd.append(one)
        with contextlib.suppress(OSError):
            one.sendall(halves[number % 4])
        if number % 50 == 0:
            served += gateway.request("GET", "/v1/health").status == 200
    tried = len(range(0, CROWD, 50))
    print(f"requests of the owner beside {CROWD} strangers: {tried} tried, {served} held")
    assert served == tried
    wait_until(lambda: descriptors(gateway) <= before + 8, HEAD_SECONDS + 40, "the end of the strangers")
    print(f"strangers turned out: {CROWD} tried, {CROWD} held")
    gateway.request("POST", "/v1/tokens", {"label": "after", "scopes": ["read"]})
    while b"token.created" not in answer.fp.readline():  # the stream of a known client continues
        pass
    stream.close()
    for one in crowd:
        one.close()


@contextlib.contextmanager
def few_descriptors(gateway: GatewayProcess) -> Iterator[None]:
    """The gateway, while it may have few descriptors and the test many."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SMALL, most))
    try:
        gateway.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, 4 * SMALL), most))
        yield
    finally:
        gateway.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def burst(gateway: GatewayProcess, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Open this many connections at once, which send nothing."""
    crowd = [stack.enter_context(socket.socket()) for _ in range(count)]
    for one in crowd:
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", gateway.port))
    return crowd


@pytest.mark.parametrize("tls", [False, True])
def test_a_burst_of_strangers_leaves_the_gateway_its_descriptors(tmp_path: Path, tls: bool) -> None:
    certificate, key, trust = tmp_path / "cert.pem", tmp_path / "key.pem", ssl.create_default_context()
    authority = trustme.CA()
    authority.configure_trust(trust)
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    options = ["--tls-cert", str(certificate), "--tls-key", str(key)] if tls else []
    gateway = GatewayProcess(tmp_path / "home", *options)
    with few_descriptors(gateway), contextlib.ExitStack() as stack:
        before = descriptors(gateway)
        burst(gateway, 2 * SMALL, stack)
        for _ in range(20):
            line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
            if tls:
                line = http.client.HTTPSConnection("127.0.0.1", gateway.port, timeout=30, context=trust)
            line.request("GET", "/v1/health", headers={"Authorization": f"Bearer {gateway.token}"})
            assert line.getresponse().status == 200
            line.close()
            assert descriptors(gateway) <= before + SMALL // 2 + 16
        wait_until(lambda: descriptors(gateway) <= before + MAX_CONNECTIONS + 16, 8, "the end of the moment they have")


def test_friends_who_come_all_at_once_are_served(gateway: GatewayProcess) -> None:
    with contextlib.ExitStack() as stack:
        crowd = burst(gateway, 200, stack)
        asked = f"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {gateway.token}\r\n\r\n".encode()
        for one in crowd:
            one.settimeout(30)
            one.sendall(asked)
        assert [one.recv(12) for one in crowd] == [b"HTTP/1.1 200"] * len(crowd)


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_a_stream_ends_with_its_token(gateway: GatewayProcess, end: str, tmp_path: Path) -> None:
    body = {"scopes": ["read"], **({"expires_seconds": 2.5} if end == "expired" else {})}
    made = gateway.request("POST", "/v1/tokens", body).json()
    stream = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    stream.request("GET", "/v1/events", headers={"Authorization": f"Bearer {made['token']}"})
    answer = stream.getresponse()
    assert answer.status == 200
    over = threading.Event()

    def read() -> None:
        answer.read()
        over.set()

    threading.Thread(target=read, daemon=True).start()
    if end == "revoked":
        assert not over.is_set()
        gateway.request("DELETE", f"/v1/tokens/{made['id']}")
    assert over.wait(10), "nothing more is sent"
