"""The sandbox of a machine that lends only some folders: which mechanism confines its commands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from farhand.machine.sandbox.bubblewrap import Sandbox
from farhand.machine.sandbox.confinement import CommandSandbox, Mount, SandboxError
from farhand.machine.sandbox.landlock import LandlockSandbox
from farhand.machine.sandbox.launch import Launch
from farhand.protocol.errors import Failed

BUBBLEWRAP: Final = "bubblewrap"
LANDLOCK: Final = "landlock"
NONE: Final = "none"
AUTO: Final = "auto"
LEVELS: Final = (AUTO, BUBBLEWRAP, LANDLOCK, NONE)


def lent_sandbox(
    wanted: str,
    roots: Sequence[str],
    workspace: str | os.PathLike[str],
    *,
    hidden: Sequence[Path] = (),
    network: bool = True,
    egress: str | None = None,
    limits: dict[str, int] | None = None,
) -> tuple[str, CommandSandbox | None, str]:
    """Return the level that this machine can give, its sandbox, and why there is none or not a better one.

    `wanted`: one of `LEVELS`; `auto` takes the best that works. `egress`: the folder of a proxy's socket, the only
    way out. Raises SandboxError if a level that was named cannot be given.
    """
    if wanted == NONE:
        return NONE, None, "it is switched off (--sandbox none)"
    mounts = [
        Mount(real, real, writable=True)
        for root in roots
        if (real := os.path.realpath(root)) != os.path.realpath(workspace)
    ]
    covered = [str(path) for path in hidden]
    reasons = []
    for level in (BUBBLEWRAP, LANDLOCK) if wanted == AUTO else (wanted,):
        sandbox: CommandSandbox
        try:
            if level == BUBBLEWRAP:
                launch = Launch(limits=limits or {})
                sandbox = Sandbox(
                    workspace, mounts=mounts, network=network, hidden=covered, launch=launch, egress=egress
                )
            else:
                sandbox = LandlockSandbox(
                    workspace, mounts=mounts, network=network, hidden=covered, limits=limits, egress=egress
                )
            sandbox.check()
        except (Failed, SandboxError) as error:
            reasons.append(f"{level}: {str(error).removeprefix('sandbox: ').removesuffix('; the command did not run')}")
            continue
        return level, sandbox, "; ".join(reasons)
    if wanted != AUTO:
        raise SandboxError(f"the sandbox {wanted!r} cannot be given: {'; '.join(reasons)}")
    return NONE, None, "; ".join(reasons)
