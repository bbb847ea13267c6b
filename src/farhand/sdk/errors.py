"""How `NodeClient.run` ends.

NodeSdkError
├── Shutdown              the shutdown event was set
├── ReconnectExhausted    max_attempts failures in a row
├── Refused               the gateway rejects this node; retrying would change nothing
└── ConfigError           an invalid setting (also a ValueError)
"""

from __future__ import annotations

from farhand.protocol.errors import FarhandError


class NodeSdkError(FarhandError):
    """Base class of everything the client raises."""


class Shutdown(NodeSdkError):
    """The shutdown event was set: tools were cancelled and the socket closed."""

    def __init__(self, message: str = "shut down on request") -> None:
        super().__init__(message)


class ReconnectExhausted(NodeSdkError):
    """`max_attempts` reconnects failed."""

    def __init__(self, attempts: int, reason: str = "") -> None:
        super().__init__(f"gave up after {attempts} attempts to reconnect" + (f": {reason}" if reason else ""))
        self.attempts = attempts


class Refused(NodeSdkError):
    """The gateway refused this node for a reason that a retry cannot change."""


class ConfigError(NodeSdkError, ValueError):
    """An invalid setting of the client."""
