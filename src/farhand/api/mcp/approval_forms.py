"""Approvals as forms that an MCP client shows to its user (`elicitation/create`)."""

from __future__ import annotations

from typing import Any, Final

from farhand.api.mcp.messages import INVALID_PARAMS, RpcError
from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.control.approvals import AnswerConflict, Approvals, NoApproval, NotYours, shown_request
from farhand.protocol.redaction import KnownSecrets
from farhand.store.tables.waiting_calls import Approval, ApprovalState

MAX_CHARS: Final = 6000


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
        """Return what would run, with its diff, as far as it fits."""
        text = _described(approval)
        cut = "\n… (cut; `farhand approvals` shows all)" if len(text) > MAX_CHARS else ""
        return self._secrets.truncate(text, MAX_CHARS) + cut

    def request(self, approval: Approval, credential: Credential) -> dict[str, Any]:
        """Return the parameters of `elicitation/create`.

        Only the owner can approve their own calls, and only if the form shows the call completely.
        """
        may = credential.id == OWNER.id and _fits(approval)
        note = "" if may else f"\nIt is too long to be approved in this form; use `farhand approve {approval.id}`."
        if credential.id != OWNER.id:
            note = f"\nThis token cannot approve its own call; the owner can, with `farhand approve {approval.id}`."
        decision = {"type": "string", "title": "Decision", "enum": ["approve", "deny"] if may else ["deny"]}
        return {
            "mode": "form",
            "message": self.text(approval) + note,
            "requestedSchema": {"type": "object", "properties": {"decision": decision}, "required": ["decision"]},
        }

    async def answer(self, approval: Approval, answer: Any, credential: Credential) -> None:
        """Take the result of `elicitation/create`. Raises RpcError for an answer that is invalid or not allowed."""
        match answer:
            case {"action": "accept", "content": {"decision": "approve" | "deny" as decision}}:
                approve = decision == "approve"
            case {"action": "decline"}:
                approve = False
            case {"action": "cancel"}:
                return
            case _:
                raise RpcError(
                    INVALID_PARAMS, "the answer needs an action, and content with the decision: approve or deny"
                )
        if approve and not _fits(approval):
            raise RpcError(INVALID_PARAMS, f"it is too long to approve here; `farhand approve {approval.id}` shows all")
        try:
            await self._approvals.answer(
                approval.id, approve=approve, by=credential.id, credential=credential, hash=approval.hash
            )
        except (NoApproval, NotYours, AnswerConflict) as error:
            raise RpcError(INVALID_PARAMS, str(error)) from None


def _described(approval: Approval) -> str:
    """Return everything that would run; a part that is too long for the form is cut."""
    shown = shown_request(approval)
    lines = [f"Approve {shown['tool']}?", *([approval.reason] if approval.reason else [])]
    lines += [str(shown[name]) for name in ("summary", "note") if shown[name]]
    if shown["command"]:
        lines.append(f"Command: {shown['command']}" + (f" (in {shown['cwd']})" if shown["cwd"] else ""))
    elif not shown["diff"]:
        lines.append(f"Arguments: {bytes(shown['args'])[: 8 * MAX_CHARS].decode(errors='replace')}")
    lines += [f"Variable {name}: {value}" for name, value in shown["env"].items()]
    lines += [f"Standard input: {shown['stdin']}"] if shown["stdin"] else []
    lines += [f"It wrote: {shown['output']}"] if shown["output"] else []
    lines += [shown["diff"]] if shown["diff"] else []
    return "\n".join(line[: 2 * MAX_CHARS] for line in lines)


def _fits(approval: Approval) -> bool:
    return len(_described(approval)) <= MAX_CHARS
