"""The version of the node socket, and the sizes both ends hold to."""

from __future__ import annotations

PROTOCOL_VERSION = 1
# 1  2026-11  six messages of the plug-in guide; everything Farhand adds is announced as a feature instead

KIB = 1024
MIB = 1024 * KIB

# What the guide allows a tool response to be.
MAX_TOOL_RESPONSE_BYTES = 4 * MIB

# Longest tool request a plain node reads; it drops anything longer without an answer.
MAX_REQUEST_BYTES = 256 * KIB

# Longest result a plug-in sends before it is truncated.
MAX_RESPONSE_BYTES = 1 * MIB

# Longest frame either end reads at all; beyond it the connection is closed.
MAX_FRAME_BYTES = 64 * MIB

# Longest frame a gateway takes from a plain node; a tool response in it has at most MAX_TOOL_RESPONSE_BYTES.
MAX_PLAIN_FRAME_BYTES = 16 * MIB

MAX_HELLO_BYTES = 1 * MIB
MAX_CAPABILITIES = 256
MAX_TOOLS = 1024
MAX_NAME_LENGTH = 256
MAX_NODE_ID_LENGTH = 128

CLOSE_BAD_HELLO = 4400
CLOSE_UNAUTHORIZED = 4401
CLOSE_NOT_ALLOWED = 4403
CLOSE_VERSION = 4406
CLOSE_HELLO_TIMEOUT = 4408
# A newer connection of the same node took over.
CLOSE_REPLACED = 4409
CLOSE_SILENT = 4410

# A plain node's response cannot be assigned to a call.
CLOSE_UNREADABLE = 4422

# Both ends wait this long for the other's first message.
HELLO_SECONDS = 10.0

LINK_PING_SECONDS = 20.0
# A silent link is asked after the first and given up after the second: half-open links end within 45 s.
LINK_DEADLINE_SECONDS = 40.0

# How much of a file goes into one frame. Larger ones cost the same for each byte, but whoever handles one does nothing
# else meanwhile.
TRANSFER_FRAME_BYTES = 256 * KIB

# From this size on, a transfer is worth connections of its own.
LONG_TRANSFER_BYTES = 4 * MIB

# How much of a transfer may be under way, unacknowledged, between its two ends.
TRANSFER_WINDOW_BYTES = 8 * MIB
