"""Failures of models.

ModelError                   the model gave no reply; the text says why and what to do
├── NotConfigured            no model is named, or the named one is unknown
├── Refused                  the provider rejected the request (key, name, parameter): do not retry
│   └── ContextOverflow      the conversation is longer than the model's context
├── BudgetSpent              the caller's budget does not allow the request; it was not sent
└── Unavailable              overloaded, unreachable or disconnected: a retry may help
"""

from __future__ import annotations

from farhand.protocol.errors import FarhandError


class ModelError(FarhandError):
    """A model gave no reply."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        # The HTTP status of the provider's answer, if there was one.
        self.status = status


class NotConfigured(ModelError):
    """The model does not exist; the text is one sentence that says what to set."""


class ModelRefused(ModelError):
    """The provider rejected the request, and would again."""


class ContextOverflow(ModelRefused):
    """The conversation does not fit into the context; compaction helps."""


class BudgetSpent(ModelError):
    """A budget does not allow the request; the text names the limit and when it renews."""


class Unavailable(ModelError):
    """The provider may answer a retry."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message, status=status)
        # True: nothing listens at the address, so many retries are pointless.
        self.unreachable = unreachable
        # Seconds to wait, as requested by the provider.
        self.retry_after = retry_after
