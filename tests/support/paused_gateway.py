"""`python -m tests.support.paused_gateway`: `farhand` with pauses where a crash or a silence would hurt most.

A pause is asked for by a file in the home: `pause-commit` (a transaction has passed its guards and is not committed),
`pause-send` (a call is committed and its frame not sent) or `pause-answer` (a node has answered and nothing is
recorded). It holds the seconds. The first to come there removes the file and stands still for that time: the writer
thread at `pause-commit`, the whole gateway at the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farhand.api.node_socket.door import NodeServices
from farhand.cli.main import main
from farhand.gateway.calls.lifecycle import Lifecycle
from farhand.protocol.messages import ToolResponse
from farhand.store.postgres.store import PostgresStore

HOME = Path(os.environ["FARHAND_HOME"])


def pause(point: str) -> None:
    path = HOME / f"pause-{point}"
    try:
        seconds = float(path.read_text())
        path.unlink()
    except (OSError, ValueError):
        return
    time.sleep(seconds)


def before(kind: type, name: str, act: Callable[..., None]) -> None:
    original = getattr(kind, name)

    def replaced(self: Any, *arguments: Any, **options: Any) -> Any:
        act(*arguments)
        return original(self, *arguments, **options)

    setattr(kind, name, replaced)


def at_answer(_connection: object, message: object) -> None:
    if isinstance(message, ToolResponse):
        pause("answer")


if __name__ == "__main__":
    before(PostgresStore, "_end", lambda: pause("commit"))
    before(Lifecycle, "_send", lambda _: pause("send"))
    before(NodeServices, "handle", at_answer)
    main()
