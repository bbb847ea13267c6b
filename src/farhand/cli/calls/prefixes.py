"""Ids that are not typed in full: any beginning that is unique names an object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from farhand.cli.client import ClientError

MOST_NAMED = 5


def matching(found: Iterable[Mapping[str, Any]], given: str, what: str, *fields: str) -> Mapping[str, Any] | None:
    """Return the one whose id is `given`, or begins or, as tables cut ids, ends with it. None if there is none.

    `fields`: those that hold an id. Raises ClientError if there are several.
    """
    everything = list(found)

    def ids(one: Mapping[str, Any]) -> list[str]:
        return [str(one[field]) for field in fields if one.get(field)]

    for matches in (str.__eq__, str.startswith, str.endswith):
        near = [one for one in everything if given and any(matches(known, given) for known in ids(one))]
        if len(near) == 1:
            return near[0]
        if near:
            names = ", ".join(ids(one)[0] for one in near[:MOST_NAMED]) + (", …" if len(near) > MOST_NAMED else "")
            raise ClientError("ambiguous", f"{len(near)} {what} ids match {given!r}: {names}; give more of the id")
    return None
