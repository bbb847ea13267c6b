"""Threads that move bulk data have a lower priority, and connections between near ends have small buffers."""

from __future__ import annotations

import os
import socket
import sys
import threading

import pytest

from farhand.machine import priority
from farhand.machine.socket_options import LITTLE_BYTES, limit_buffers_on_fast_links

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")


def in_thread() -> tuple[int, int]:
    found: list[tuple[int, int]] = []

    def run() -> None:
        priority.lower_thread_priority()
        found.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@linux
def test_a_thread_steps_back_alone() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    niceness, policy = in_thread()
    assert (niceness, policy) == (priority.BULK_NICENESS, os.SCHED_BATCH)
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == before


@linux
def test_a_system_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert in_thread()[0] == os.getpriority(os.PRIO_PROCESS, 0)


def sizes(connection: socket.socket) -> list[int]:
    return [connection.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_RCVBUF, socket.SO_SNDBUF)]


@linux
def test_little_is_under_way_between_ends_that_are_near() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        limit_buffers_on_fast_links(near)
        assert all(size <= 2 * LITTLE_BYTES for size in sizes(near))


@linux
def test_what_has_no_round_trip_is_left_as_it_is() -> None:
    near, far = socket.socketpair()
    with near, far:
        before = sizes(near)
        limit_buffers_on_fast_links(near)
        assert sizes(near) == before
