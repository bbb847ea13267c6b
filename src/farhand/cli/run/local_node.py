"""The node that `farhand up` starts for this machine."""

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

log = logging.getLogger(__name__)

FIRST_DELAY = 0.2
LONGEST_DELAY = 30.0
STEADY_SECONDS = 60.0


class LocalNode:
    """A node in a child process, restarted when it exits. Starts at once; the owner calls `stop`."""

    def __init__(self, gateway: Gateway, home: Path, workspace: Path, certificate: str | None) -> None:
        self._gateway = gateway
        node_id = default_node_id()
        self._secret = new_secret("fhn")  # dies with the gateway
        gateway.admit_node(node_id, self._secret)
        workspace.mkdir(parents=True, exist_ok=True)
        # -P: the current folder may be the workspace, and no program in it is to be taken for Farhand.
        self._command = [sys.executable, "-P", "-m", "farhand", "node", "--gateway", gateway.url, "--id", node_id]
        self._command += ["--workspace", str(workspace.absolute()), "--home", str(home)]
        self._command += ["--token-stdin", "--with-parent", str(os.getpid())]
        self._command += ["--pinned-cert", certificate] if certificate else []
        self._stopping = threading.Event()
        self._child = self._start()
        threading.Thread(target=self._watch, name="local-node", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        # Not SIGTERM, which restarts the node alone and keeps the commands of waiting callers running.
        self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches only the gateway, which then stops the node.
        child = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            # Not in the arguments or the environment, which commands of the node can read.
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
            log.warning("local node exited with status %d; restarting it", status)
            self._child = self._start()
            delay = min(delay * 2, LONGEST_DELAY)
