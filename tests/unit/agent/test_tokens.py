"""The estimate of tokens against a real tokenizer."""

from __future__ import annotations

import bpe_openai
import msgspec
import pytest

from farhand.agent.tokens import IMAGE_TOKENS, message_tokens, text_tokens
from farhand.llm.messages import Image, Message, Text, ToolUse
from tests.support.harness import ROOT

REAL = bpe_openai.get_encoding("o200k_base")

TEXTS = {
    "prose": (ROOT / "README.md").read_text(),
    "code": (ROOT / "src/farhand/agent/loop.py").read_text(),
    "json": msgspec.json.encode([{"id": n, "path": f"/home/user/{n}.txt", "ok": True} for n in range(99)]).decode(),
    "german": "Die Größe der Dateien übersteigt das zulässige Maß; bitte prüfen Sie die Einstellungen noch einmal. "
    * 9,
}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_estimate_is_near_and_rather_high(kind: str) -> None:
    real = len(REAL.encode(TEXTS[kind]))
    assert 0.9 <= text_tokens(TEXTS[kind]) / real <= 1.45


def test_a_long_text_is_estimated_from_a_sample() -> None:
    text = TEXTS["prose"] * 100
    assert text_tokens(text) == pytest.approx(100 * text_tokens(TEXTS["prose"]), rel=0.25)


def test_what_a_message_holds_counts() -> None:
    assert text_tokens("") == 0
    plain = message_tokens(Message("user", "hello"))
    assert message_tokens(Message("user", (Text("hello"), Image("data:")))) == plain + IMAGE_TOKENS
    assert message_tokens(Message("assistant", "hello", tool_calls=(ToolUse("1", "read", '{"path":"a"}'),))) > plain
