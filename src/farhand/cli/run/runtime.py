"""The log and the event loop of long-running commands."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any, Final

from farhand.protocol.errors import FarhandError
from farhand.protocol.redaction import KnownSecrets, mask_text

_CONTROL: Final = {
    code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}
_CONTROL_AND_NEWLINE: Final = {**_CONTROL, ord("\n"): "\\n"}


def set_up_logging(level: str) -> MaskedFormatter:
    """Log to standard error with secrets masked. Raises FarhandError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise FarhandError(f"[log] level: unknown level {level!r}; use debug, info, warning or error")
    handler = logging.StreamHandler(sys.stderr)
    formatter = MaskedFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(formatter)
    logging.basicConfig(level=number, handlers=[handler], force=True)
    # These log whole URLs, including a token in the query.
    for name in ("uvicorn.error", "uvicorn.access", "websockets", "picows", "httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    return formatter


class MaskedFormatter(logging.Formatter):
    """Masks everything that looks like a secret, and the known secrets.

    A message is one line, without control characters that a terminal would obey.
    """

    secrets = KnownSecrets()

    def know(self, secrets: KnownSecrets) -> None:
        self.secrets = secrets

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).translate(_CONTROL_AND_NEWLINE)

    def format(self, record: logging.LogRecord) -> str:
        return self.secrets.redact_text(mask_text(super().format(record).translate(_CONTROL)))


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop if it is installed."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
