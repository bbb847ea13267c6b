"""`Trial`: keeps or discards what a trial run changed. It is not offered to models; people and programs call it."""

# Parameter names follow those of the other node tools.
# ruff: noqa: N803

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from farhand.machine.sandbox.trials import TrialConflict, Trials
from farhand.protocol.errors import Failed, InvalidArgs
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.tools.node_family import node_spec

if TYPE_CHECKING:
    from farhand.tools.preview import Preview

NAME: Final = "Trial"
# The same tool for the machine of the gateway.
OWN: Final = "trial"
ACTIONS: Final = ("show", "keep", "discard")
OWNER_ID: Final = "owner"
# The beginning of the error of a trial whose files were changed since.
CONFLICT: Final = "conflict: "

TrialId = Annotated[str, Meta(description="Id of the trial: trialId of its result.")]
Action = Annotated[str, Meta(description="One of: show, keep, discard.", extra_json_schema={"enum": ACTIONS})]


def named_trial(tool: str, arguments: Any) -> tuple[str, bool] | None:
    """Return the id of the trial that a call is about, and whether it keeps it; None for any other call."""
    if not tool.casefold().endswith(NAME.casefold()) or not isinstance(arguments, dict):
        return None
    keeps = str(arguments.get("action")).strip().lower() == "keep"
    return str(arguments.get("trialId")), keeps


def keeping(trial_id: str) -> msgspec.Raw:
    """Return the arguments that keep a trial."""
    return msgspec.Raw(msgspec.json.encode({"trialId": trial_id, "action": "keep"}))


def caller_name(credential: str) -> str:
    """Return the name under which a machine counts the trials of a credential; empty for the owner's."""
    return "" if credential == OWNER_ID else hashlib.sha256(credential.encode(errors="replace")).hexdigest()[:16]


def discards(arguments: Any) -> bool:
    """Whether a call of the tool discards a trial."""
    return isinstance(arguments, dict) and str(arguments.get("action")).strip().lower() == "discard"


class TrialTool:
    """The tool over one machine's trials. It blocks; run it in a thread."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def Trial(self, *, trialId: TrialId, action: Action = "show") -> dict[str, Any]:  # noqa: N802
        """Show what a trial run changed, apply these changes (keep), or drop them (discard)."""
        wanted = action.strip().lower()
        if wanted not in ACTIONS:
            raise InvalidArgs(f"unknown action {action[:100]!r}: use one of {', '.join(ACTIONS)}")
        try:
            acts = {"show": self._trials.find, "keep": self._trials.keep, "discard": self._trials.discard}
            return acts[wanted](trialId).described()
        except TrialConflict as error:
            raise Failed(f"{CONFLICT}{error.message}") from None

    def preview_Trial(self, *, trialId: str, action: str) -> Preview:  # noqa: N802
        from farhand.tools.preview import FileEffect, Preview  # noqa: PLC0415 - memory of an idle node

        trial = self._trials.find(trialId)
        if trial.state == "running":  # what it will have changed is not known yet
            return Preview(note=f"the command of the trial is running: {trial.command}")
        changes = trial.described()["changes"]
        files = tuple(
            FileEffect(change["path"], diff=change.get("diff", ""), note="" if "diff" in change else change["kind"])
            for change in changes
        )
        return Preview(files=files, summary=f"{action} the changes of the trial of: {trial.command}")


SPEC: Final = node_spec(NODE_TOOLS[NAME], TrialTool.Trial, skip=1)
