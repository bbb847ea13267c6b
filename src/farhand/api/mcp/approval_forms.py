"""Approvals as forms that an MCP client shows to its user (`elicitation/create`)."""

from __future__ import annotations

from typing import Any, Final

from farhand.api.mcp.messages import INVALID_PARAMS, RpcError
from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.control.approvals import AnswerConflict, Approvals, NoApproval, NotYours, shown_request
from farhand.protocol.redaction import KnownSecrets
from farhand.store.tables.waiting_calls import Approval, ApprovalState

MAX_CHARS: Final = 6000
MAX_ARGUMENT_CHARS: Final = 2000


class ApprovalForms:
    """Shows waiting calls to the client that made them, and takes the answers of its user."""

    def __init__(self, approvals: Approvals, secrets: KnownSecrets) -> None:
        self._approvals = approvals
        self._secrets = secrets

    async def pending(self, call_id: str) -> Approval | None:
        """Return the approval that a call waits for."""
        found = await self._approvals.find(call_id)
        return found if found is not None and found.state is ApprovalState.PENDING else None

    def text(self, approval: Approval) -> str:
        """Return what would run, with its diff."""
        shown = shown_request(approval)
        lines = [f"Approve {shown['tool']}?", *([approval.reason] if approval.reason else [])]
        lines += [str(shown[name]) for name in ("summary", "note") if shown[name]]
        if shown["command"]:
            lines.append(f"Command: {shown['command']}" + (f" (in {shown['cwd']})" if shown["cwd"] else ""))
        elif not shown["diff"]:
            lines.append(f"Arguments: {bytes(shown['args']).decode()[:MAX_ARGUMENT_CHARS]}")
        lines += [shown["diff"]] if shown["diff"] else []
        text = self._secrets.redact_text("\n".join(lines))
        return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}\n… (cut; `farhand approvals` shows all)"

    def request(self, approval: Approval, credential: Credential) -> dict[str, Any]:
        """Return the parameters of `elicitation/create`. Only the owner approves calls of their own."""
        may = credential.id == OWNER.id
        note = "" if may else f"\nThis token cannot approve its own call: `farhand approve {approval.id}` does."
        decision = {"type": "string", "title": "Decision", "enum": ["approve", "deny"] if may else ["deny"]}
        return {
            "mode": "form",
            "message": self.text(approval) + note,
            "requestedSchema": {"type": "object", "properties": {"decision": decision}, "required": ["decision"]},
        }

    async def answer(self, approval: Approval, answer: Any, credential: Credential) -> None:
        """Take the result of `elicitation/create`. Raises RpcError for an answer that does not count."""
        match answer:
            case {"action": "accept", "content": {"decision": "approve" | "deny" as decision}}:
                approve = decision == "approve"
            case {"action": "decline"}:
                approve = False
            case {"action": "cancel"}:
                return
            case _:
                raise RpcError(INVALID_PARAMS, "the answer needs action, and content with decision: approve or deny")
        try:
            await self._approvals.answer(
                approval.id, approve=approve, by=credential.id, credential=credential, hash=approval.hash
            )
        except (NoApproval, NotYours, AnswerConflict) as error:
            raise RpcError(INVALID_PARAMS, str(error)) from None
