"""What every command that stays does first: where its log goes, and the loop it runs on."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any, Final

from farhand.protocol.errors import FarhandError
from farhand.protocol.redaction import KnownSecrets, mask_text

_STEERING: Final = {
    code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}
_LINE: Final = {**_STEERING, ord("\n"): "\\n"}


def set_up_logging(level: str) -> MaskedFormatter:
    """Log lines to standard error, secrets masked. Raises FarhandError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise FarhandError(f"[log] level: {level!r} is none of debug, info, warning, error")
    handler = logging.StreamHandler(sys.stderr)
    formatter = MaskedFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(formatter)
    logging.basicConfig(level=number, handlers=[handler], force=True)
    # They put whole addresses, a token in the query included, into their lines.
    for noisy in ("uvicorn.error", "uvicorn.access", "websockets", "picows", "httpx2", "httpcore2"):
        logging.getLogger(noisy).setLevel(max(number, logging.WARNING))
    return formatter


class MaskedFormatter(logging.Formatter):
    """What looks like a secret is not in any line, nor any of those it is told by value.

    A message is one line, and no character in it steers a terminal, whoever's words it repeats.
    """

    secrets = KnownSecrets()

    def know(self, secrets: KnownSecrets) -> None:
        self.secrets = secrets

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).translate(_LINE)

    def format(self, record: logging.LogRecord) -> str:
        return self.secrets.redact_text(mask_text(super().format(record).translate(_STEERING)))


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where the platform has it."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
