"""The version of the node socket, and the limits both ends observe."""

from __future__ import annotations

PROTOCOL_VERSION = 1
# 1  2026-11  the six messages of the plug-in guide; Farhand announces its additions as features

KIB = 1024
MIB = 1024 * KIB

# The guide's limit for a tool response.
MAX_TOOL_RESPONSE_BYTES = 4 * MIB

# The longest tool request that a plain node accepts; it drops longer ones silently.
MAX_REQUEST_BYTES = 256 * KIB

# The longest result that a plug-in sends without truncating it.
MAX_RESPONSE_BYTES = 1 * MIB

# The longest frame either end accepts; a longer one closes the connection.
MAX_FRAME_BYTES = 64 * MIB

# The longest frame a gateway accepts from a plain node; its response has at most MAX_TOOL_RESPONSE_BYTES.
MAX_PLAIN_FRAME_BYTES = 16 * MIB

MAX_HELLO_BYTES = 1 * MIB
MAX_CAPABILITIES = 256
MAX_TOOLS = 1024
MAX_NAME_LENGTH = 256
MAX_NODE_ID_LENGTH = 128

# The gateway stops or is replaced: connect again, to another one if there is one.
CLOSE_RESTART = 1012
# Connect again later.
CLOSE_BUSY = 1013
CLOSE_BAD_HELLO = 4400
CLOSE_UNAUTHORIZED = 4401
CLOSE_NOT_ALLOWED = 4403
CLOSE_VERSION = 4406
CLOSE_HELLO_TIMEOUT = 4408
# A newer connection of the same node replaced this one.
CLOSE_REPLACED = 4409
CLOSE_SILENT = 4410

# A response of a plain node cannot be matched to a call.
CLOSE_UNREADABLE = 4422

# Both ends wait this long for the other's first message.
HELLO_SECONDS = 10.0

LINK_PING_SECONDS = 20.0
# A silent link is pinged after the first and closed after the second: half-open links end within 45 s.
LINK_DEADLINE_SECONDS = 40.0

# File bytes per frame. Larger frames cost the same per byte but block the event loop longer.
TRANSFER_FRAME_BYTES = 256 * KIB

# From this size on, a transfer uses connections of its own.
LONG_TRANSFER_BYTES = 4 * MIB

# Unacknowledged bytes of a transfer between its two ends.
TRANSFER_WINDOW_BYTES = 8 * MIB
