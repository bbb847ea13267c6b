"""What a route says of itself: the OpenAPI description is made from nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

JSON = "application/json"
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
# Further answers of routes that honour `Range` and `If-None-Match`.
PARTIAL = {206: "The range that was asked for.", 304: "The client has this version."}


class Query(msgspec.Struct, frozen=True):
    """A parameter of the query, or of the head."""

    name: str
    description: str
    type: Any = str
    required: bool = False


class About(msgspec.Struct, frozen=True):
    """In one sentence what a route is for, what it takes, and what it answers.

    What any route may answer (a stranger's 401, a lacking scope's 403, an unknown parameter's 400 …) need not be said;
    of other errors `errors` names the statuses. Types are those that read the body or are written as the answer.
    """

    summary: str
    # The type of a JSON body.
    body: Any = None
    # The media type of a body that is not JSON; `*/*` for any.
    takes: str | None = None
    # The type of the answer; None for an object that is told in the text.
    answer: Any = None
    status: int = 200
    media: tuple[str, ...] = (JSON,)
    # Further statuses that are no errors of the usual shape, and what they mean.
    also: dict[int, str] = {}
    errors: tuple[int, ...] = ()
    query: tuple[Query, ...] = ()
    # Takes an `Idempotency-Key`.
    idempotent: bool = False
