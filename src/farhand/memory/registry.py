"""Choose the embedder from the settings."""

from __future__ import annotations

import msgspec

from farhand.memory.embedders import Embedder, EmbeddingError, HttpEmbedder, UnavailableEmbedder
from farhand.memory.minilm import HOW_TO_INSTALL, LocalEmbedder, is_installed
from farhand.memory.settings import LOCAL, NONE, MemorySettings


class Provider(msgspec.Struct, frozen=True):
    """The server of the chat model."""

    base_url: str
    api_key: str = ""


def make_embedder(settings: MemorySettings, provider: Provider) -> Embedder | None:
    """Return the configured embedder, or None for keyword search only. One that cannot work fails when it is used."""
    model = settings.embedding_model
    if model == NONE or (not model and not is_installed()):
        return None
    if model in ("", LOCAL):
        return LocalEmbedder() if is_installed() else UnavailableEmbedder(LOCAL, HOW_TO_INSTALL)
    url = settings.embedding_url or provider.base_url
    key = settings.embedding_api_key
    if not key and url.rstrip("/") == provider.base_url.rstrip("/"):
        key = provider.api_key  # never sent to another address
    try:
        return HttpEmbedder(url, model, key)
    except EmbeddingError as error:
        return UnavailableEmbedder(model, str(error))
