"""The output of commands with the gateway's secrets masked.

Readers count bytes and may start at any offset, so a secret is masked by as many asterisks as it has bytes, and
searched for beyond both ends of the requested range: reading it in two halves does not reveal it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import msgspec

from farhand.gateway.nodes.output import Output
from farhand.protocol.redaction import KnownSecrets


async def covered(
    pages: Callable[[int], AsyncGenerator[Output, None]], offset: int, secrets: KnownSecrets
) -> AsyncGenerator[Output, None]:
    """Yield the masked pages from `offset` on; `pages` returns the original ones from an offset."""
    position = max(0, offset - secrets.longest + 1)
    # What was read from `position` on and may be the beginning of a secret.
    held = b""
    source = pages(position)
    try:
        async for page in source:
            data = held + page.data
            if page.offset != position + len(held):  # a gap: what follows may be the end of a secret
                position, rest = page.offset, secrets.leading_partial(page.data)
                data = b"*" * rest + page.data[rest:]
            shown = len(data) if page.over else len(data) - secrets.trailing_partial(data)
            end = position + shown
            start = max(position, offset)
            yield msgspec.structs.replace(
                page, offset=start, next_offset=max(end, start), data=secrets.overwrite(data)[start - position : shown]
            )
            position, held = end, data[shown:]
    finally:
        await source.aclose()
