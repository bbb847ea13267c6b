"""Which addresses the commands of a sandbox reach by which names, and how many connections they have."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from farhand.machine.sandbox.egress import MOST_CONNECTIONS, EgressProxy, NetworkRule
from farhand.machine.sandbox.launch import EGRESS_SOCKET
from tests.unit.sdk.wire import asynchronous

METADATA = ["169.254.169.254", "::ffff:169.254.169.254", "fe80::a9fe:a9fe", "fd00:ec2::254", "64:ff9b::a9fe:a9fe"]
PRIVATE = ["10.1.2.3", "172.16.0.1", "192.168.1.1", "127.0.0.1", "::1", "fd12::1", "::ffff:10.1.2.3"]
NOWHERE = ["0.0.0.0", "::", "198.18.0.1", "224.0.0.1", "2001::1", "2002:a9fe:a9fe::1"]
PUBLIC = ["93.184.216.34", "2606:2800:220:1::1"]


@pytest.mark.parametrize(
    ("rule", "host", "reached"),
    [
        ("local", "name.example", PRIVATE),
        ("allow:name.example", "name.example", PUBLIC),
        ("allow:*.example", "name.example", PUBLIC),
        ("allow:other.example", "name.example", []),
        ("allow:name.example,local", "name.example", [*PUBLIC, *PRIVATE]),
        ("allow:local", "name.example", PRIVATE),
        ("allow:name.example,10.1.2.3", "name.example", [*PUBLIC, "10.1.2.3"]),
        ("allow:name.example,169.254.169.254", "name.example", [*PUBLIC, "169.254.169.254"]),
        ("allow:localhost", "localhost", [*PUBLIC, "127.0.0.1", "::1"]),
        ("none", "name.example", []),
        ("host", "name.example", [*METADATA, *PRIVATE, *NOWHERE, *PUBLIC]),
    ],
)
def test_a_name_leads_to_the_addresses_it_may_have(rule: str, host: str, reached: list[str]) -> None:
    read = NetworkRule.read(rule)
    every = [*METADATA, *PRIVATE, *NOWHERE, *PUBLIC]
    assert [one for one in every if read.reaches(host, 80, one)] == [one for one in every if one in reached]


def test_an_address_that_is_named_is_reached() -> None:
    rule = NetworkRule.read("allow:10.1.2.3:5432,[::1]:80")
    assert rule.reaches("10.1.2.3", 5432, "10.1.2.3") and not rule.reaches("10.1.2.3", 22, "10.1.2.3")
    assert rule.reaches("::1", 80, "::1")


@asynchronous
async def test_commands_do_not_use_up_the_open_files_of_the_node(tmp_path: Path) -> None:
    proxy = EgressProxy(tmp_path / "egress", lambda: NetworkRule.read("local"))
    proxy.listen(asyncio.get_running_loop())
    socket = str(tmp_path / "egress" / EGRESS_SOCKET)

    silent = [await asyncio.open_unix_connection(socket) for _ in range(MOST_CONNECTIONS)]
    reader, writer = await asyncio.open_unix_connection(socket)
    assert b" 503 " in await reader.readline()
    for _, other in [*silent, (reader, writer)]:
        other.close()
    answer = b""
    while b" 400 " not in answer:  # until the proxy has seen that they are closed
        reader, writer = await asyncio.open_unix_connection(socket)
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            answer = await reader.readline()
        writer.close()
    await proxy.close()
