"""What a model reads of a tool's result: each text once.

The result over HTTP and in the record has the fields of GSV's node tools, some of which repeat others.
"""

from __future__ import annotations

from typing import Any


def without_repeats(value: Any) -> Any:
    """Return a result without fields that repeat another: the `tail` of an `output`, the `text` of `sessions`."""
    if not isinstance(value, dict):
        return value
    output, tail = value.get("output"), value.get("tail")
    if isinstance(output, str) and isinstance(tail, str) and output.endswith(tail):
        value = {name: item for name, item in value.items() if name != "tail"}
    if isinstance(value.get("sessions"), list) and isinstance(value.get("text"), str):
        value = {name: item for name, item in value.items() if name != "text"}
    return value
