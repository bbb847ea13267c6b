"""The node that `farhand up` brings along."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from farhand.app.gateway import Gateway
from farhand.gateway.access.credentials import new_secret
from farhand.node.names import default_node_id
from farhand.store.tables.tokens import Token, token_hash

log = logging.getLogger("farhand")

FIRST_DELAY = 0.2
LONGEST_DELAY = 30.0
STEADY_SECONDS = 60.0


class LocalNode:
    """A node for this machine in a process of its own, started again should it die; whoever makes it calls `stop`."""

    def __init__(self, gateway: Gateway, home: Path, workspace: Path, certificate: str | None) -> None:
        self._gateway = gateway
        node_id = default_node_id()
        self._secret = new_secret("fhn")  # dies with the gateway
        gateway.hub.credentials.add(
            Token(
                "local-node",
                token_hash(self._secret),
                "node",
                node_id,
                "this machine",
                gateway.hub.node_registry.clock(),
            )
        )
        workspace.mkdir(parents=True, exist_ok=True)
        self._command = [sys.executable, "-m", "farhand", "node", "--gateway", gateway.url, "--id", node_id]
        self._command += ["--workspace", str(workspace.absolute()), "--home", str(home)]
        self._command += ["--token-stdin", "--with-parent", str(os.getpid())]
        self._command += ["--pinned-cert", certificate] if certificate else []
        self._stopping = threading.Event()
        self._child = self._start()
        threading.Thread(target=self._watch, name="local-node", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        # Not SIGTERM, which is for a restart of the node alone: commands that a caller waits for would go on.
        self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        # Ctrl-C is for the gateway, which ends the node in its turn; a node that has just begun could not answer it.
        child = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            # Neither the arguments nor the environment carry it: both can be read by what the node runs.
            pipe.write(self._secret.encode() + b"\n")
        return child

    def _watch(self) -> None:
        delay = FIRST_DELAY
        while True:
            started = time.monotonic()
            status = self._child.wait()
            if time.monotonic() - started > STEADY_SECONDS:
                delay = FIRST_DELAY
            if self._stopping.wait(delay) or self._gateway.stopping:
                return
            log.warning("the node of this machine ended with status %d; starting it again", status)
            self._child = self._start()
            delay = min(delay * 2, LONGEST_DELAY)
