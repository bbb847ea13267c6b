"""The remote endpoint of a copy, as the gateway describes it, and the function that reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farhand.cli.client import Client, ClientError, url_path

# Called with the bytes copied so far, and the total if it is known.
Progress = Callable[[int, int | None], None]


def content_path(**query: str | None) -> str:
    """Return the path to which a file's content is sent, or from which it is fetched. Raises ClientError."""
    return _path("/v1/transfers/content", **query)


def manifest(client: Client, endpoint: str, agent: str | None) -> dict[str, Any]:
    """Return the name of what is at an endpoint, and a folder's entries. Raises ClientError (`not_found`)."""
    return dict(client.get(_path("/v1/transfers/manifest", source=endpoint, agent=agent)).value)


def _path(path: str, **query: str | None) -> str:
    try:
        return url_path(path, **query)
    except UnicodeEncodeError as error:
        raise ClientError("invalid_args", f"cannot transfer {error.object!r}: the name is not UTF-8") from None
