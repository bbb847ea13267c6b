"""Send approval requests to the approvers on channels, and accept `approve ID` or `deny ID` as answers.

The text of a request never changes, so an answer to its id applies to exactly what was shown. A request that is too
long to be shown in full can be denied on a channel, but not approved.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Final

from farhand.gateway.control.approvals import AnswerConflict, Approvals, NoApproval, request_of
from farhand.gateway.messaging.channel import Channel, Incoming
from farhand.gateway.messaging.inbound import address
from farhand.gateway.messaging.outbox import Messages
from farhand.machine.time_zone import utc_text
from farhand.protocol.errors import ToolError
from farhand.store.tables.outbox import Place
from farhand.store.tables.waiting_calls import Approval

log = logging.getLogger(__name__)

# The longest request shown in a chat, in characters.
LONGEST_SHOWN: Final = 8000
_ANSWER: Final = re.compile(r"/?(approve|deny)\s+([A-Za-z2-9]{6})(?:\s+(.{1,1000}))?", re.DOTALL | re.IGNORECASE)


class ChannelApprovals:
    """Ask approvers on channels; `approvers` returns their addresses, such as `telegram:4711`, by channel name."""

    def __init__(self, approvals: Approvals, messages: Messages, approvers: Callable[[], Sequence[str]]) -> None:
        self._approvals = approvals
        self._messages = messages
        self._approvers = approvers

    async def send(self, approval: Approval) -> None:
        """Send a request to each approver, at most once each."""
        text, _ = question(approval)
        for approver in self._approvers():
            channel, _, peer = approver.partition(":")
            try:
                place = Place(*self._messages.resolve(channel), peer.strip(), "dm")
                await self._messages.accept(
                    place, text, message_id=f"approval:{approval.id}", origin=f"approval:{approval.id}"
                )
            except ToolError as error:
                log.error("failed to send approval %s to %s: %s", approval.id, approver, error.message)

    async def receive(self, channel: Channel, incoming: Incoming, place: Place) -> bool:
        """Return whether a message was an answer by an approver; it is then not passed to the agent."""
        found = _ANSWER.fullmatch(incoming.text.strip())
        who = self._approver(channel, incoming)
        if found is None or who is None:
            return False
        approve = found[1].lower() == "approve"
        approval = await self._approvals.find(found[2])
        try:
            if approval is None:
                raise NoApproval(f"There is no approval {found[2].upper()}.")
            if approve and not question(approval)[1]:
                raise AnswerConflict(
                    f"The request {approval.id} was too long to be shown here. "
                    f"Look at it with `farhand approvals show {approval.id}`, and approve it there."
                )
            decided = await self._approvals.answer(
                approval.id, approve=approve, by=who, hash=approval.hash, remark=(found[3] or "").strip()
            )
            said = f"{'Approved' if approve else 'Denied'}: {request_of(decided).bound.tool} ({decided.id})."
        except (NoApproval, AnswerConflict) as error:
            said = str(error)
        key = f"approval:{found[2].upper()}:{incoming.id}"
        await self._messages.accept(place, said, message_id=key, origin=key)
        return True

    def _approver(self, channel: Channel, incoming: Incoming) -> str | None:
        """Return the sender if they may answer: the service authenticates them, and the chat is private."""
        if not incoming.trusted or incoming.peer_kind != "dm":
            return None
        here = (channel.settings.kind, channel.settings.account)
        for approver in self._approvers():
            name, _, peer = approver.partition(":")
            try:
                known = self._messages.resolve(name)
            except ToolError:
                continue
            if known == here and peer.strip() and address(peer) == address(incoming.sender):
                return approver
        return None


def question(approval: Approval) -> tuple[str, bool]:
    """Return the text of a request, and whether it is complete."""
    request = request_of(approval)
    preview = request.bound.preview
    where = f" on {request.bound.node_id}" if request.bound.node_id else ""
    lines = [f"May I run {request.bound.tool}{where}?"]
    behalf = f" on behalf of {request.bound.on_behalf_of}" if request.bound.on_behalf_of else ""
    lines.append(f"Asked by {request.bound.credential}{behalf}, from {' < '.join(request.origins)} ({approval.rule}).")
    if approval.reason:
        lines.append(approval.reason)
    if preview.command is not None:
        lines += [f"In {preview.cwd}:", fenced(preview.command)]
        lines += [f"With {name}={value!r}" for name, value in preview.env.items()]
    if preview.stdin is not None:
        lines += ["Standard input:", fenced(preview.stdin)]
    if preview.summary:
        lines.append(fenced(preview.summary))
    if preview.output:
        lines += ["It wrote:", fenced(preview.output)]
    lines += [fenced(effect.diff) if effect.diff else f"{effect.path}: {effect.note}" for effect in preview.files]
    if preview.command is None and not preview.files:
        lines.append(fenced(bytes(request.args).decode("utf-8", "replace")))
    lines += [f"Note: {note}" for note in (request.bound.untried, preview.note) if note]
    text = "\n".join(lines)
    whole = len(text) <= LONGEST_SHOWN
    if not whole:
        text = "\n".join([lines[0], lines[1], f"It is too long to show here: `farhand approvals show {approval.id}`."])
    ways = f"approve {approval.id}   or   deny {approval.id}" if whole else f"deny {approval.id}"
    return f"{text}\nAnswer: {ways}\n(until {utc_text(approval.deadline_at)}, else it is denied)", whole


def fenced(text: str) -> str:
    """Return the text as a code block that its content cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.rstrip(chr(10))}\n{fence}"
