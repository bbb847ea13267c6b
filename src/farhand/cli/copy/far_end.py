"""The end of a copy that is not here, as the gateway tells of it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from farhand.cli.client import Client, ClientError


def content_path(**values: str | None) -> str:
    """Where the content of a file is sent to or fetched from. Raises ClientError for a name that cannot travel."""
    return f"/v1/transfers/content?{_query(values)}"


def manifest(client: Client, endpoint: str, agent: str | None) -> dict[str, Any]:
    """The name of what is there, and the entries of a folder. Raises ClientError, `not_found` when nothing is."""
    path = f"/v1/transfers/manifest?{_query({'source': endpoint, 'agent': agent})}"
    return dict(client.get(path).value)


def _query(values: dict[str, str | None]) -> str:
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return urlencode(given, quote_via=quote)
    except UnicodeEncodeError as error:
        raise ClientError(
            "invalid_args", f"{error.object!r} is not UTF-8, as a name must be to be transferred"
        ) from None
