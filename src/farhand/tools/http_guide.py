"""The tools of `POST /agent/process`: `read_file`, `create_file`, `update_file` and `shell`, on the gateway's machine.

Names, fields, limits and texts are those of the guide that its clients follow; the work is done in `machine`.
"""

from __future__ import annotations

import asyncio
import codecs
import math
import os
import signal
import stat
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from msgspec import Meta

from farhand.machine.files.allowed_paths import check_path_text, display
from farhand.machine.files.files import Files, file_errors
from farhand.machine.jobs.foreground import Foreground
from farhand.machine.jobs.job import Job
from farhand.machine.jobs.jobs import Jobs
from farhand.machine.sandbox.confinement import Confinement, unconfined
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, Timeout
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.secret_handles import shell_command
from farhand.tools.preview import Preview, change_preview, command_preview, current_content
from farhand.tools.schema import encode_argument
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
        """`confinement` is called before each command. `secrets` are redacted, even if a text is cut within one."""
        self._secrets = secrets or KnownSecrets()
        self._files = files
        self._confinement = confinement
        self._jobs = jobs
        self._foreground = Foreground(jobs)

    def tools(self) -> list[Tool]:
        return [
            tool(self.read_file, read_only=True, capability="filesystem.read"),
            tool(self.create_file, capability="filesystem.write", preview=self.preview_create),
            tool(self.update_file, capability="filesystem.write", preview=self.preview_update),
            tool(
                self.shell,
                capability="shell.exec",
                timeout_ms=(MOST_SECONDS + 10) * 1000,
                continues=True,
                preview=self.preview_shell,
                takes_handles=True,
            ),
        ]

    def read_file(self, *, path: FilePath) -> dict[str, Any]:
        """Read a text file; of a long one, the first 65,536 bytes."""
        name = _named(path)
        with self._files.open(path) as file, file_errors("read", name):
            data = file.read(MOST_READ)
            size = max(os.fstat(file.fileno()).st_size, len(data))
        return _shown_file(name, data, size, self._secrets)

    def create_file(self, *, path: FilePath, content: Content) -> dict[str, Any]:
        """Create a file that does not exist yet, with its folders."""
        name, data = self._created(path, content)
        self._files.create(path, data)
        return {"ok": True, "path": name, "size": len(data), "text": f"created {name} ({len(data)} bytes)"}

    def preview_create(self, *, path: str, content: str) -> Preview:
        _, data = self._created(path, content)
        if current_content(self._files, path) is not None:
            raise Failed(f"'{display(path)}' already exists")
        return change_preview(self._files, path, None, data)

    def _created(self, path: str, content: str) -> tuple[str, bytes]:
        """Return the name for the answer, and the bytes to write."""
        name, data = _named(path), encode_argument("content", content)
        if path.endswith("/"):
            self._files.place(path)  # a forbidden path is reported first
            raise InvalidArgs(f"parameter 'path': {path!r} names a folder; name a file, missing folders are created")
        return name, data

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
        chosen, name, data = _updated(path, content, mode)
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

    def preview_update(self, *, path: str, content: str, mode: str) -> Preview:
        chosen, _, data = _updated(path, content, mode)
        old = current_content(self._files, path)
        if old is None:
            raise NotFound(f"'{display(path)}' does not exist")
        return change_preview(self._files, path, old, old + data if chosen == "append" else data)

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
        folder, seconds = self._started(command, cwd, timeout_seconds)
        line, hidden = shell_command(command, context.secrets)
        shell = await asyncio.to_thread(self._shell, folder, inherit=bool(hidden))
        job = await self._foreground.run(
            self._jobs.start(
                line,
                workdir=folder,
                timeout=seconds,
                shell=shell,
                env=hidden,
                bare=shell is not SHELL,
                call_id=context.call_id,
            )
        )
        assert job.exit is not None
        output = self._output(job, job.exit.size)
        if job.exit.timed_out:
            said = self._secrets.redact_excerpt(output[-MOST_IN_ERROR:], before=len(output) > MOST_IN_ERROR)
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

    def preview_shell(self, *, command: str, cwd: str | None, timeout_seconds: float | str | None) -> Preview:
        folder, seconds = self._started(command, cwd, timeout_seconds)
        where = "in the sandbox" if self._confinement()[0] else "without a sandbox"
        return command_preview(command, folder, summary=f"{where}, time limit {seconds:g} s")

    def _started(self, command: str, cwd: str | None, timeout_seconds: float | str | None) -> tuple[str, float]:
        """Return the working folder and the time limit of a command."""
        if not command.strip():
            raise InvalidArgs("parameter 'command': must not be empty")
        check_path_text("command", command)
        return self._folder(cwd), _seconds(timeout_seconds)

    def _shell(self, folder: str, *, inherit: bool) -> Sequence[str]:
        sandbox, _ = self._confinement()
        if sandbox is None:
            return SHELL
        sandbox.check()
        return sandbox.words(folder, inherit=inherit)

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
        return self._secrets.redact_excerpt(text, after=True) + "\n... (output truncated)" if cut else text


def _shown_file(name: str, data: bytes, size: int, secrets: KnownSecrets) -> dict[str, Any]:
    truncated = size > len(data)
    text = content = data.decode(errors="replace") if not truncated else ""
    if truncated:
        # The last character of a truncated text may be incomplete; it is dropped.
        content = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        text = content = secrets.redact_excerpt(content, after=True)
        text += f"\n\n... (truncated, showing first {len(data)} bytes of {size} bytes from {name})"
    return {"ok": True, "path": name, "size": size, "truncated": truncated, "content": content, "text": text}


def _named(path: str) -> str:
    """Return the caller's path, normalised. Raises InvalidArgs if it is empty."""
    if not path.strip():
        raise InvalidArgs("parameter 'path': must not be empty")
    check_path_text("path", path)
    return display(os.path.normpath(path))


def _updated(path: str, content: str, mode: str) -> tuple[str, str, bytes]:
    """Return the mode, the name for the answer, and the bytes to write."""
    chosen = mode.strip().lower()
    if chosen not in MODES:
        raise InvalidArgs(f"parameter 'mode': must be overwrite or append, not {mode!r}")
    return chosen, _named(path), encode_argument("content", content)


def _seconds(wanted: float | str | None) -> float:
    """Return the time limit, clamped to the allowed range. Raises InvalidArgs for something that is not a number."""
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
    """Return the exit code as a shell reports it: 128 plus the number of the signal that ended the command."""
    assert job.exit is not None
    if job.exit.exit_code is not None:
        return job.exit.exit_code
    number = signal.Signals.__members__.get(job.exit.signal or "")
    return 128 + (number.value if number else 0)
