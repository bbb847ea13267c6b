"""Failures of models.

ModelError                   the model gave no reply; the text says what was wrong and what to do
├── NotConfigured            no model is named, or the named one is unknown
├── Refused                  the provider understood and said no (a key, a name, a parameter): asking again is no use
│   └── ContextOverflow      the conversation is longer than the model's context
└── Unavailable              overloaded, unreachable or cut off: asking again may help
"""

from __future__ import annotations

from farhand.protocol.errors import FarhandError


class ModelError(FarhandError):
    """A model gave no reply."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        # The HTTP status of the provider's answer, where there was one.
        self.status = status


class NotConfigured(ModelError):
    """There is no such model; the text is one sentence saying what to set."""


class Refused(ModelError):
    """The provider will give the same answer again."""


class ContextOverflow(Refused):
    """The conversation does not fit; compaction helps."""


class Unavailable(ModelError):
    """The provider may answer when asked again."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message, status=status)
        # True: nobody listens there, so asking many times is no use.
        self.unreachable = unreachable
        # Seconds the provider asked to wait.
        self.retry_after = retry_after
