"""What commands print, with the gateway's secrets covered.

Readers count bytes and may begin at any, so a secret is covered by as many stars as it has bytes, and looked for
beyond both ends of what was asked for: asked for in two halves, it is not shown either.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import msgspec

from farhand.gateway.nodes.output import Output
from farhand.protocol.redaction import KnownSecrets


async def covered(
    pages: Callable[[int], AsyncGenerator[Output, None]], offset: int, secrets: KnownSecrets
) -> AsyncGenerator[Output, None]:
    """The pages from `offset` on; `pages` gives them as they are, from any offset."""
    position = max(0, offset - secrets.longest + 1)
    # From `position` on: read, and not shown yet since it may be the beginning of a secret.
    held = b""
    source = pages(position)
    try:
        async for page in source:
            data = held + page.data
            if page.offset != position + len(held):  # what was in between is no longer kept, the end of a secret is
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
