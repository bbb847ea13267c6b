"""Decides whether a call may run now, has to wait, or is denied."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from farhand.gateway.access.credentials import OWNER, Credentials
from farhand.gateway.access.principal import Principal
from farhand.gateway.access.standing_approvals import RULE, StandingApprovals
from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.catalog import Target, read_arguments
from farhand.gateway.calls.open_call import OpenCall, Waiting
from farhand.gateway.calls.policy import Forbidden, Policy, Verdict
from farhand.gateway.calls.policy_subject import GATEWAY, HTTP, Subject, subject_of
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import ToolCall, ToolSpec
from farhand.protocol.errors import Failed, InvalidArgs
from farhand.store.journal.events import append_event
from farhand.store.ports import Store, log_failure
from farhand.tools import trial, undo

log = logging.getLogger(__name__)

# Finds out which files a call changes; None if that is not known.
ChangedFiles = Callable[[Target, ToolCall, Principal], Awaitable[tuple[str, ...] | None]]

_UNNAMED = (undo.NAME.casefold(), trial.NAME.casefold())
DID_NOT_RUN = "the call did not run"
MAX_WAITING = 1000
# Limits for the calls of one credential that wait at once: their arguments are kept until they end.
MAX_WAITING_PER_CREDENTIAL = 250
MAX_WAITING_BYTES = 64 * 1024 * 1024


class PolicyCheck:
    """Applies the owner's policy and the validity of tokens to calls."""

    def __init__(
        self,
        database: Store,
        node_registry: NodeRegistry,
        credentials: Credentials | None,
        policy: Callable[[], Policy | None],
        changed_files: ChangedFiles | None = None,
        standing: StandingApprovals | None = None,
    ) -> None:
        """Without `credentials`, every caller is valid. `policy` returns the policy in force. `changed_files` finds out
        which files a call changes without naming them. `standing` are the permanent approvals."""
        self._database = database
        self._node_registry = node_registry
        self._credentials = credentials
        self._policy = policy
        self._changed_files = changed_files
        self._standing = standing

    def invalid(self, principal: Principal) -> str | None:
        """Return why a credential involved was revoked or has expired; None while all are valid."""
        if self._credentials is None or (principal.actor is OWNER and principal.on_behalf_of is None):
            return None
        return self._credentials.ended(principal.ids)

    def check_valid(self, principal: Principal) -> None:
        """Raise Denied if a credential involved was revoked or has expired."""
        reason = self.invalid(principal)
        if reason is not None:
            raise Denied(f"{reason}; {DID_NOT_RUN}")

    def current(self, principal: Principal) -> Principal:
        """Return a principal with the rights that it has now: it may be a stored one.

        Raises Denied if a credential involved was revoked or has expired.
        """
        self.check_valid(principal)
        if self._credentials is None or (principal.actor is OWNER and principal.on_behalf_of is None):
            return principal
        actor, asker = self._credentials.reduced(principal.actor), principal.on_behalf_of
        asker = None if asker is None else self._credentials.reduced(asker)
        same = actor is principal.actor and asker is principal.on_behalf_of
        return principal if same else Principal(actor, asker)

    async def changed_files(self, call: ToolCall, target: Target, principal: Principal) -> tuple[str, ...] | None:
        """Return the files that an undo or a trial changes, for rules about paths; None if they cannot be known now.

        A trial that is only shown counts too: it shows their content. One that is discarded does not.
        """
        find = self._changed_files
        if self._policy() is None or find is None or not _changes_unnamed(call, target):
            return ()
        return await find(target, call, principal)

    def check_new(
        self,
        call: ToolCall,
        target: Target,
        principal: Principal,
        origins: Sequence[str],
        before: int | None,
        timeout_ms: int,
        waiting: Iterable[OpenCall],
        changed: tuple[str, ...] | None = (),
    ) -> Waiting | None:
        """Return how a call has to wait; None if it may run. `waiting`: the calls that wait already. `changed` as from
        `changed_files`.

        Raises Forbidden, and Failed when too many calls wait.
        """
        offline = target.node is not None and target.node.connection is None
        # While its node is offline it cannot be asked; the policy is applied again when it is back.
        verdict = self._verdict(call, target, principal, origins, () if offline else changed)
        approval = verdict if verdict is not None and verdict.decision == "ask" else None
        if not offline and approval is None:
            if verdict is not None and verdict.rule != "default":
                self._note("policy.allowed", call, principal, origins, verdict)
            return None
        _check_room(call, principal, waiting)
        if offline:
            approval = None
        return Waiting(
            why="node" if offline else "approval",
            principal=principal,
            origins=tuple(origins),
            timeout_ms=timeout_ms,
            until=self.until(approval, before),
            patience_ms=call.timeout_ms,
            before=before,
            rule="" if approval is None else approval.rule,
            reason="" if approval is None else approval.reason,
        )

    def as_trial(self, call: ToolCall, target: Target, principal: Principal, origins: Sequence[str]) -> ToolCall:
        """Return a call as the policy lets it run: as a trial if a rule allows nothing else. Raises Forbidden."""
        policy = self._policy()
        if policy is None or not policy.tries:
            return call
        verdict = self._verdict(call, target, principal, origins, may_try=True)
        if verdict is None or verdict.decision != "trial" or _is_trial(call):
            return call
        if target.spec is None or "trial" not in target.spec.parameters.get("properties", {}):
            raise _only_as_trial(call, verdict, "which this tool cannot be")
        arguments = {**(read_arguments(call.args) or {}), "trial": True}
        return msgspec.structs.replace(call, args=msgspec.Raw(msgspec.json.encode(arguments)))

    def refuse_keeping(self, tried: ToolCall, target: Target, principal: Principal, origins: Sequence[str]) -> None:
        """Raise Forbidden unless the policy lets a principal run a call at once and without a trial: others decide what
        is kept. Approving the trial does not approve its changes."""
        if principal.id == OWNER.id:
            return
        arguments = {name: value for name, value in (read_arguments(tried.args) or {}).items() if name != "trial"}
        tried = msgspec.structs.replace(tried, args=msgspec.Raw(msgspec.json.encode(arguments)))
        verdict = self._verdict(tried, target, principal, origins, may_try=True)
        if verdict is not None and verdict.decision in ("trial", "ask"):
            self._note("policy.denied", tried, principal, origins, verdict)
            allows = "allows {} only as a trial" if verdict.decision == "trial" else "asks about {} without a trial"
            raise Forbidden(
                f"the policy {allows.format(repr(tried.tool))} ({verdict.rule}), so the owner keeps it, or a "
                f"caller whom the rule does not concern; {DID_NOT_RUN}"
            )

    async def check_again(self, call: ToolCall, target: Target, waiting: Waiting) -> Verdict | None:
        """Apply the policy to a call that waited; return the verdict if it needs an approval. Raises Forbidden."""
        changed = await self.changed_files(call, target, waiting.principal)
        verdict = self._verdict(call, target, waiting.principal, waiting.origins, changed)
        return verdict if verdict is not None and verdict.decision == "ask" else None

    async def previewed(self, call: ToolCall, target: Target, waiting: Waiting) -> Verdict | None:
        """Return the verdict on a waiting call if a rule has it run as a trial before its owner is asked.

        Raises Forbidden.
        """
        policy = self._policy()
        if policy is None or not policy.previews or _is_trial(call):
            return None
        verdict = await self.check_again(call, target, waiting)
        return verdict if verdict is not None and verdict.preview == "trial" else None

    def refuse_denied(self, call: ToolCall, target: Target, principal: Principal, *, held: bool) -> None:
        """Raise Forbidden where the policy denies a call or, with `held`, asks about it."""
        if held:
            self.refuse_held(call, target, principal, HTTP)
        else:
            self._verdict(call, target, principal, HTTP)

    def refuse_unseen(self, call: ToolCall, target: Target, principal: Principal) -> None:
        """Raise Forbidden where the policy denies a call whose answer a list would show; it is not recorded."""
        verdict = self._judged(call, target, principal, HTTP)
        if verdict is not None and verdict.decision == "deny":
            raise _denied(call, verdict)

    def refuse_held(self, call: ToolCall, target: Target, principal: Principal, origins: Sequence[str]) -> None:
        """Raise Forbidden unless the policy lets a call run at once: for requests that cannot wait for an answer."""
        verdict = self._verdict(call, target, principal, origins)
        if verdict is not None and verdict.decision == "ask":
            self._note("policy.denied", call, principal, origins, verdict)
            raise Forbidden(
                f"the policy asks the owner about {call.tool!r} ({verdict.rule}), and this request cannot wait for the "
                f"answer; call {call.tool} by POST /v1/tools/invoke instead"
            )

    def check_folder(
        self, call: ToolCall, target: Target, principal: Principal, origins: Sequence[str], *, approved: bool
    ) -> None:
        """Raise Forbidden if the policy stops a transfer that turns out to be one of a folder.

        `approved`: whether the owner approved the call, which answers for rules that ask.
        """
        verdict = self._verdict(call, target, principal, origins, folder=True)
        if verdict is not None and verdict.decision == "ask" and not approved:
            self._note("policy.denied", call, principal, origins, verdict)
            raise Forbidden(
                f"this is a folder, and the policy asks the owner about files that may be in it ({verdict.rule}); call "
                f"{call.tool} with a source that ends with '/' to have the owner asked"
            )

    def until(self, approval: Verdict | None, before: int | None) -> int:
        """Return when a wait ends: for an approval, when no answer counts as a denial."""
        policy = self._policy()
        if approval is None or policy is None:
            assert before is not None, "a call waits for its node until a given moment"
            return before
        until = self._node_registry.clock() + round(policy.seconds(approval) * 1000)
        return until if before is None else min(until, before)

    def _verdict(
        self,
        call: ToolCall,
        target: Target,
        principal: Principal,
        origins: Sequence[str],
        changed: tuple[str, ...] | None = (),
        *,
        folder: bool = False,
        may_try: bool = False,
    ) -> Verdict | None:
        """Return the verdict of the policy, if there is one. Raises Forbidden if it denies the call.

        It denies a call that a rule lets run as a trial only, unless it is one or, with `may_try`, may become one.
        """
        verdict = self._judged(call, target, principal, origins, changed, folder=folder)
        if verdict is None:
            return None
        if verdict.decision == "deny":
            self._note("policy.denied", call, principal, origins, verdict)
            raise _denied(call, verdict)
        if verdict.decision == "trial" and not may_try and not _is_trial(call):
            self._note("policy.denied", call, principal, origins, verdict)
            raise _only_as_trial(call, verdict, "with trial: true")
        return verdict

    def _judged(
        self,
        call: ToolCall,
        target: Target,
        principal: Principal,
        origins: Sequence[str],
        changed: tuple[str, ...] | None = (),
        *,
        folder: bool = False,
    ) -> Verdict | None:
        policy = self._policy()
        if policy is None or origins is GATEWAY:
            return None
        subject = subject_of(
            target,
            call.args,
            credential=principal.id,
            askers=principal.askers,
            makers=() if self._credentials is None else self._credentials.makers(principal.ids),
            session_key=call.session_key,
            origins=origins,
            agent_id=call.agent_id,
            nodes=self._node_registry.nodes,
            changed=changed,
            folder=folder,
        )
        verdict = policy.judge(subject)
        if verdict.decision == "ask":
            verdict = always_allowed(self._standing, subject, call.args, call.agent_id) or verdict
        return verdict

    def _note(self, kind: str, call: ToolCall, principal: Principal, origins: Sequence[str], verdict: Verdict) -> None:
        now = self._node_registry.clock()
        behalf = principal.on_behalf_of
        data: dict[str, Any] = {"tool": call.tool, "by": principal.id}
        if behalf is not None:
            data["on_behalf_of"] = behalf.id
        data |= {"origin": list(origins), "rule": verdict.rule}
        written = self._database.write(lambda store: append_event(store, now, kind, call.id, data), durable=False)
        log_failure(written, log, f"add {kind} of call {call.id} to the journal")


def always_allowed(
    standing: StandingApprovals | None, subject: Subject, args: msgspec.Raw, agent_id: str | None
) -> Verdict | None:
    """Return the verdict of the standing approval that covers a call; None if there is none."""
    if standing is None:
        return None
    found = standing.covering(
        subject.names,
        subject.node_id,
        bytes(args),
        credential=subject.credential,
        on_behalf_of=next(iter(subject.askers), None),
        origins=subject.origins,
        agent_id=agent_id,
        session_key=subject.session_key,
    )
    return None if found is None else Verdict("allow", f"{RULE}{found.id}", f"permanently approved by {found.made_by}")


def _check_room(call: ToolCall, principal: Principal, waiting: Iterable[OpenCall]) -> None:
    """Raise Failed when too many calls wait, in all or on behalf of one credential."""
    waiting = list(waiting)
    if len(waiting) >= MAX_WAITING:
        raise Failed(f"busy: {len(waiting)} calls wait already; {DID_NOT_RUN}, try again later")
    asker = principal.asker.id
    own = [one.record for one in waiting if one.principal is not None and one.principal.asker.id == asker]
    size = sum(len(bytes(record.args)) for record in own) + len(bytes(call.args))
    if len(own) >= MAX_WAITING_PER_CREDENTIAL or size > MAX_WAITING_BYTES:
        raise Failed(
            f"busy: {len(own)} calls of {asker!r} wait already, {size} bytes with this one; at most "
            f"{MAX_WAITING_PER_CREDENTIAL} calls and {MAX_WAITING_BYTES} bytes may wait. The call did not run"
        )


def names_no_files(tool: str) -> bool:
    """Whether a tool of this name may be one that changes files which its arguments do not name."""
    return tool.casefold().endswith(_UNNAMED)


def _changes_unnamed(call: ToolCall, target: Target) -> bool:
    def is_tool(spec: ToolSpec, name: str) -> bool:
        return target.spec is spec or (target.own is not None and target.tool == name.casefold())

    if is_tool(undo.SPEC, undo.NAME):
        return True
    return is_tool(trial.SPEC, trial.NAME) and not trial.discards(read_arguments(call.args))


def _is_trial(call: ToolCall) -> bool:
    try:
        arguments = read_arguments(call.args)
    except InvalidArgs:
        return False
    return isinstance(arguments, dict) and arguments.get("trial") is True


def _denied(call: ToolCall, verdict: Verdict) -> Forbidden:
    why = f": {verdict.reason}" if verdict.reason else ""
    return Forbidden(f"the policy denies {call.tool!r} ({verdict.rule}){why}; {DID_NOT_RUN}")


def _only_as_trial(call: ToolCall, verdict: Verdict, how: str) -> Forbidden:
    why = f": {verdict.reason}" if verdict.reason else ""
    return Forbidden(f"the policy allows {call.tool!r} only as a trial ({verdict.rule}), {how}{why}; {DID_NOT_RUN}")
