"""Find out whether a model answers."""

from __future__ import annotations

import asyncio
import time

import msgspec

from farhand.llm.errors import ModelError
from farhand.llm.messages import Message
from farhand.llm.model import Model, ModelRequest

QUESTION = "Reply with the word ok."
SECONDS = 60.0
# Enough for a model that thinks before it answers.
MAX_TOKENS = 512


class ProbeResult(msgspec.Struct, frozen=True):
    """How a model answered a short question."""

    ok: bool
    model: str
    seconds: float
    error: str = ""


async def probe(model: Model, seconds: float = SECONDS) -> ProbeResult:
    """Ask a model a short question, once."""
    began = time.monotonic()
    request = ModelRequest((Message("user", QUESTION),), max_tokens=MAX_TOKENS)
    error = ""
    try:
        async with asyncio.timeout(seconds):
            async for _ in model.stream(request):
                pass
    except ModelError as problem:
        error = str(problem)
    except TimeoutError:
        error = f"no answer within {seconds:g} s"
    return ProbeResult(not error, model.name, round(time.monotonic() - began, 1), error)
