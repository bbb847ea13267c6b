"""The four tools of the HTTP guide: `read_file`, `create_file`, `update_file` and `shell`, on the gateway's machine.

Names, fields, limits and texts are the guide's. What is read, written and run is `machine`'s.
"""

from __future__ import annotations

import asyncio
import codecs
import math
import os
import signal
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from farhand.machine.files import Files, refuse_unnameable, shown, told
from farhand.machine.foreground import Foreground
from farhand.machine.job import Job
from farhand.machine.jobs import Jobs
from farhand.machine.sandbox import Confinement, unconfined
from farhand.protocol.errors import InvalidArgs, Timeout
from farhand.protocol.known_secrets import KnownSecrets
from farhand.tools.tool import CallContext, Tool, tool

MOST_READ = 65_536
MOST_OUTPUT = 16_384
MOST_IN_ERROR = 1000
DEFAULT_SECONDS = 20
MOST_SECONDS = 120
SHELL = ("/bin/sh", "-lc")
MODES = ("overwrite", "append")

FilePath = Annotated[str, Meta(description="Path of the file: relative to the workspace, or absolute; no `..`.")]
Content = Annotated[str, Meta(description="Text of the file.")]


class GuideTools:
    """The four tools over one machine's files and commands. The file tools block; run them in a thread."""

    def __init__(
        self,
        files: Files,
        jobs: Jobs,
        confinement: Callable[[], Confinement] = unconfined,
        secrets: KnownSecrets | None = None,
    ) -> None:
        """`confinement` is asked before each command. Of `secrets` no half is shown where a text is cut."""
        self._secrets = secrets or KnownSecrets()
        self._files = files
        self._confinement = confinement
        self._jobs = jobs
        self._foreground = Foreground(jobs)

    def read_file(self, *, path: FilePath) -> dict[str, Any]:
        """Read a text file; of a long one, the first 65,536 bytes."""
        name = _named(path)
        with self._files.open(path) as file, told("read", name):
            data = file.read(MOST_READ)
            size = max(os.fstat(file.fileno()).st_size, len(data))
        return _shown_file(name, data, size, self._secrets)

    def read_at_once(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """As `read_file`, for a small file that the kernel has in memory; None for any other."""
        path = arguments.get("path")
        if not isinstance(path, str) or not path.strip():
            return None
        data = self._files.peek(path, MOST_READ)
        return None if data is None else _shown_file(_named(path), data, len(data), self._secrets)

    def create_file(self, *, path: FilePath, content: Content) -> dict[str, Any]:
        """Create a file that does not exist yet, with its folders."""
        name, data = _named(path), _encoded(content)
        if path.endswith("/"):
            self._files.place(path)  # a forbidden path is that first
            raise InvalidArgs(f"parameter 'path': {path!r} names a folder; name a file, its folders are made")
        self._files.create(path, data)
        return {"ok": True, "path": name, "size": len(data), "text": f"created {name} ({len(data)} bytes)"}

    def update_file(
        self,
        *,
        path: FilePath,
        content: Content,
        mode: Annotated[
            str,
            Meta(description="overwrite (default) or append.", extra_json_schema={"enum": MODES}),
        ] = "overwrite",
    ) -> dict[str, Any]:
        """Overwrite an existing file, or append to it."""
        chosen = mode.strip().lower()
        if chosen not in MODES:
            raise InvalidArgs(f"parameter 'mode': must be overwrite or append, not {mode!r}")
        name, data = _named(path), _encoded(content)
        if chosen == "append":
            size = self._files.append(path, data)
        else:
            self._files.update(path, data)
            size = len(data)
        return {
            "ok": True,
            "path": name,
            "mode": chosen,
            "size": size,
            "text": f"updated {name} with mode={chosen}",
        }

    async def shell(
        self,
        *,
        command: Annotated[str, Meta(description="Command for `sh -lc`.")],
        context: CallContext,
        cwd: Annotated[str | None, Meta(description="Folder to run in; the workspace by default.")] = None,
        timeout_seconds: Annotated[
            int | float | str | None,
            Meta(description="Seconds until the command is ended; 20 by default, at most 120."),
        ] = None,
    ) -> dict[str, Any]:
        """Run a shell command. High risk: use it only where the file tools cannot do the work."""
        if not command.strip():
            raise InvalidArgs("parameter 'command': must not be empty")
        refuse_unnameable("command", command)
        seconds = _seconds(timeout_seconds)
        folder = self._folder(cwd)
        shell = await asyncio.to_thread(self._shell, folder)
        job = await self._foreground.run(command, workdir=folder, timeout=seconds, shell=shell, call_id=context.call_id)
        assert job.exit is not None
        output = self._output(job, job.exit.size)
        if job.exit.timed_out:
            said = self._secrets.hide_piece(output[-MOST_IN_ERROR:], before=len(output) > MOST_IN_ERROR)
            raise Timeout(f"the command did not end within {seconds:g} s and was ended; its output: {said}")
        code = _exit_code(job)
        lines = [f"$ {command}"]
        if code != 0:
            lines.append(f"(command failed with exit code {code})")
        if output.strip():
            lines.append(output.strip())
        elif code == 0:
            lines.append("(command completed with no output)")
        return {"ok": code == 0, "command": command, "exit_code": code, "output": output, "text": "\n".join(lines)}

    def _shell(self, folder: str) -> Sequence[str]:
        sandbox, _ = self._confinement()
        if sandbox is None:
            return SHELL
        sandbox.check()
        return sandbox.words(folder)

    def _folder(self, cwd: str | None) -> str:
        if not cwd:
            return self._files.place(".").real
        if not stat.S_ISDIR(self._files.status(cwd).st_mode):
            raise InvalidArgs(f"parameter 'cwd': {cwd!r} is not a folder")
        return self._files.place(cwd).real

    def _output(self, job: Job, size: int) -> str:
        data = self._jobs.read(job, 0, MOST_OUTPUT).data[:size] if size else b""
        cut = size > len(data)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not cut)
        return self._secrets.hide_piece(text, after=True) + "\n... (output truncated)" if cut else text


def guide_tools(
    files: Files,
    jobs: Jobs,
    confinement: Callable[[], Confinement] = unconfined,
    secrets: KnownSecrets | None = None,
) -> list[Tool]:
    tools = GuideTools(files, jobs, confinement, secrets)
    return [
        tool(tools.read_file, read_only=True, capability="filesystem.read", at_once=tools.read_at_once),
        tool(tools.create_file, capability="filesystem.write"),
        tool(tools.update_file, capability="filesystem.write"),
        tool(tools.shell, capability="shell.exec", timeout_ms=(MOST_SECONDS + 10) * 1000, continues=True),
    ]


def _shown_file(name: str, data: bytes, size: int, secrets: KnownSecrets) -> dict[str, Any]:
    truncated = size > len(data)
    text = content = data.decode(errors="replace") if not truncated else ""
    if truncated:
        # The last character of a cut text may be cut as well; it is left out.
        content = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        text = content = secrets.hide_piece(content, after=True)
        text += f"\n\n... (truncated, showing first {len(data)} bytes of {size} bytes from {name})"
    return {"ok": True, "path": name, "size": size, "truncated": truncated, "content": content, "text": text}


def _named(path: str) -> str:
    """The path as the caller wrote it, tidied. Raises InvalidArgs for none."""
    if not path.strip():
        raise InvalidArgs("parameter 'path': must not be empty")
    refuse_unnameable("path", path)
    return shown(os.path.normpath(path))


def _encoded(content: str) -> bytes:
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgs(f"parameter 'content': not valid Unicode at character {error.start}") from None


def _seconds(wanted: float | str | None) -> float:
    """Raises InvalidArgs for what is no number; one out of range becomes the nearest that is."""
    if wanted is None:
        return DEFAULT_SECONDS
    try:
        seconds = float(wanted)
    except (ValueError, OverflowError):
        seconds = math.nan
    if isinstance(wanted, bool) or math.isnan(seconds):
        raise InvalidArgs(f"parameter 'timeout_seconds': must be a number of seconds, not {wanted!r}")
    return min(seconds, MOST_SECONDS) if seconds > 0 else DEFAULT_SECONDS


def _exit_code(job: Job) -> int:
    """As a shell tells it: a command that a signal ended has 128 and its number."""
    assert job.exit is not None
    if job.exit.exit_code is not None:
        return job.exit.exit_code
    number = signal.Signals.__members__.get(job.exit.signal or "")
    return 128 + (number.value if number else 0)
