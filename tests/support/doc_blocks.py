"""Runs the command blocks of a documentation page, and compares what they print with what the page shows.

Blocks marked `console` have prompts: `$ command`, or `laptop$ command` for another machine, followed by the output.
Blocks marked `sh` are scripts. Commands of a page share variables and the current folder. Comments before a block say
more:

    <!-- not run: REASON -->        the block cannot run in a test
    <!-- background -->             its commands keep running until the page ends; they must print what is shown
    <!-- file: PATH -->             the block, of any kind, is a file; `~` is the reader's home
    <!-- before: COMMANDS -->       what a reader would have already: run, but not shown

In the output, `…` stands for any text and a line `...` for any lines. Identifiers, codes and tokens differ from run to
run: where the page shows one, the real one takes its place in the commands that follow. Times, durations and versions
may differ. A command whose output is not shown must succeed; one that fails must show the error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.harness import ROOT, end_marked, wait_until

PATIENCE = 120
PARTS = re.compile(
    r"<!-- (?P<word>not run|background|file|before)(?::\s*(?P<value>.*?))? *-->"
    r"|^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
PROMPT = re.compile(r"(?P<host>[a-z][\w-]*)?\$ +(?P<command>.*)")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
IDENTIFIER = re.compile(
    UUID + r"|fh[a-z]+_[\w…-]+"
    r"|ed25519:[\w+/=…-]+"
    r"|\b[A-Z0-9]{4}-[A-Z0-9]{4}(?:@\S+)?"
    r"|\b[0-9a-f]{8,64}\b"
    r"|\b(?=[A-Z]*[0-9])(?=[0-9]*[A-Z])[A-Z0-9]{6}\b"
)
VARIABLE = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)?)?"
    r"|\b\d\d:\d\d(?::\d\d)?\b"
    r"|<?\b\d+(?:\.\d+)? (?:ms|s|min|h|bytes|KB|MB|GB|KiB|MiB|GiB)\b"
    r"|\bjust now\b|\bnow\b|\b\d+ ?[a-z]+ ago\b"
    r"|\b\d+\.\d+\.\d+[\w.+-]*"
)
# Commands that only show something, which may take a moment to be there.
READS = re.compile(
    r"cat [\w.]+$|farhand (nodes|ps|calls|approvals|log|events|policy explain|cron runs|mcp list|tools|sessions)\b"
    r"(?!.*\b(stop|new|fork|cancel|forget)\b)"
)
SETTLING = 20
# Commands that must not run in a test.
CHANGES_THE_SYSTEM = re.compile(
    r"\b(pip3?|uvx?|npm|apt|apt-get|brew|pipx) (tool )?install\b|\bdocker\b|farhand service|sudo "
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclasses.dataclass
class Block:
    kind: str
    text: str
    # Markers: the words of the comments before it, with their values.
    marks: dict[str, str]
    line: int


@dataclasses.dataclass
class Command:
    text: str
    shown: list[str]
    host: str = ""


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page with their marks; a `before` comment is a block of its own."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    for part in PARTS.finditer(page):
        line = page.count("\n", 0, part.start()) + 1
        if part["word"] == "before":
            found.append(Block("before", part["value"], {}, line))
        elif part["word"]:
            marks[part["word"]] = part["value"] or ""
        else:
            indent = len(part["indent"])
            text = "".join(one[indent:] if one[:indent].isspace() else one for one in part["text"].splitlines(True))
            found.append(Block(part["kind"], text, marks, line))
            marks = {}
    return found


def commands(block: Block) -> list[Command]:
    """Return the commands of a block."""
    if block.kind in {"sh", "before"}:
        return [Command(block.text, [])]
    found: list[Command] = []
    for line in block.text.splitlines():
        prompt = PROMPT.match(line)
        if found and not found[-1].shown and unfinished(found[-1].text):
            found[-1].text += "\n" + line.removeprefix("> ")
        elif prompt is not None:
            found.append(Command(prompt["command"], [], prompt["host"] or ""))
        else:
            assert found, f"output before the first prompt: {line!r}"
            found[-1].shown.append(line)
    return found


def unfinished(command: str) -> bool:
    """Whether a shell would ask for another line."""
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


class Reader:
    """Follows a page: one home for each machine, whose commands share variables and the current folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str], replaced: Mapping[str, str]) -> None:
        """`replaced`: texts of the page that are different here, such as the gateway's port."""
        self.folder = folder
        self.home = folder / "home"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        # What was run and what it printed, for authors of pages.
        self.transcript = folder / "transcript"
        self._mark = f"TEST_PAGE={uuid.uuid4()}"
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_", "OPENAI_"))
        }
        self._environment = {
            **clean,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "200",
            "TMPDIR": str(self.temporary),
            **environment,
            **dict([self._mark.split("=")]),
        }
        self._replaced = {"/tmp/": f"{self.temporary}/", **replaced}
        self._known: dict[str, str] = {}
        self._running: list[subprocess.Popen[bytes]] = []
        # The reader is in the folder of Farhand, with its environment.
        (self.home_of("") / ".venv").symlink_to(sys.prefix)
        (self.home / "examples").symlink_to(ROOT / "examples")

    def close(self) -> None:
        """End what the page left running."""
        for process in reversed(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        end_marked(self._mark)

    def home_of(self, host: str) -> Path:
        home = self.home if host in {"", "gateway"} else self.folder / "hosts" / host
        home.mkdir(parents=True, exist_ok=True)
        return home

    def follow(self, page: str) -> None:
        """Run the blocks of a page in their order."""
        for block in blocks(page):
            if "not run" in block.marks:
                continue
            if "file" in block.marks:
                self._write(block)
            elif block.kind in {"console", "sh", "before"}:
                for command in commands(block):
                    try:
                        self._start(command) if "background" in block.marks else self._run(command)
                    except AssertionError as error:
                        raise AssertionError(f"line {block.line}: $ {command.text}\n{error}") from None

    def _write(self, block: Block) -> None:
        path = self.home / block.marks["file"].removeprefix("~/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._real(block.text))

    def _real(self, text: str) -> str:
        for shown in sorted(self._known, key=len, reverse=True):
            text = text.replace(shown, self._known[shown])
        for shown, real in self._replaced.items():
            text = text.replace(shown, real)
        return text

    def _script(self, command: Command) -> tuple[list[str], dict[str, str]]:
        assert not CHANGES_THE_SYSTEM.search(command.text), "this changes the system; mark the block `not run`"
        home = self.home_of(command.host)
        state, place = home / ".shell-state", home / ".shell-place"
        script = (
            f'[ -f {state} ] && . {state}; cd "$(cat {place} 2>/dev/null || echo {home})"; set -a\n'
            f"{self._real(command.text)}\n"
            f"status=$?; set +a; export -p > {state}; pwd > {place}; exit $status"
        )
        return ["bash", "-c", script], {**self._environment, "HOME": str(home)}

    def _run(self, command: Command) -> None:
        printed = self._printed(command)
        if READS.match(command.text):
            # What it lists may take a moment, such as the join of a node that was started.
            end = time.monotonic() + SETTLING
            while self._matches(command.shown, printed, whole=True) is None and time.monotonic() < end:
                printed = self._printed(command)
        if command.shown:
            self._compare(command.shown, printed, whole=True)

    def _printed(self, command: Command) -> str:
        """Run it, and return what it printed. It must succeed if the page shows no output."""
        script, environment = self._script(command)
        try:
            done = subprocess.run(
                script,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(
                f"did not end in {PATIENCE} s\n{(late.output or b'').decode(errors='replace')}"
            ) from None
        printed = done.stdout.decode(errors="replace")
        with self.transcript.open("a") as file:
            file.write(f"$ {command.text}\n{self._normal(printed, blanks=True)}\n")
        reported = any(line.strip() not in {"", "...", "…"} for line in command.shown)
        assert reported or done.returncode == 0, f"status {done.returncode}\n{printed}"
        return printed

    def _start(self, command: Command) -> None:
        script, environment = self._script(command)
        output = self.folder / f"background-{len(self._running)}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                script, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._running.append(process)

        def printed() -> bool:
            text = output.read_text(errors="replace")
            if self._matches(command.shown, text, whole=False) is not None:
                return True
            assert process.poll() is None, f"ended with status {process.returncode}\n{text}"
            return False

        try:
            wait_until(printed, PATIENCE, "the output shown")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{output.read_text(errors='replace')}") from None
        self._compare(command.shown, output.read_text(errors="replace"), whole=False)

    def _compare(self, shown: list[str], printed: str, *, whole: bool) -> None:
        match = self._matches(shown, printed, whole=whole)
        assert match is not None, "\n".join(["it printed", self._normal(printed), "instead of", *shown])
        self._known |= match

    def _normal(self, printed: str, *, blanks: bool = False) -> str:
        """Return output as the page would show it: its paths and addresses, without colours, with single blanks."""
        text = ANSI.sub("", printed).replace("\r", "")
        for shown, real in reversed(self._replaced.items()):
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(real)}", shown, text)
        text = text.replace(str(self.home), "/home/me")
        for home in (self.folder / "hosts").glob("*"):
            text = text.replace(str(home), "/home/me")
        return text if blanks else "\n".join(" ".join(line.split()) for line in text.splitlines()).strip("\n")

    def _matches(self, shown: list[str], printed: str, *, whole: bool) -> dict[str, str] | None:
        """Return the identifiers of the page with those of the output, or None if the output is different."""
        names: list[str] = []
        lines: list[str] = []
        for line in shown:
            if line.strip() == "...":
                lines.append(r"(?:.*\n)*?")
            else:
                lines.append(f"{''.join(patterns(' '.join(line.split()), names))}\n")
        pattern = "".join(lines).strip()
        text = self._normal(printed) + "\n"
        match = re.fullmatch(rf"{pattern}\s*", text) if whole else re.search(rf"^{pattern}", text, re.MULTILINE)
        return None if match is None else dict(zip(names, match.groups(), strict=True))


def patterns(line: str, names: list[str]) -> Iterator[str]:
    """Yield regular expressions that match a line; add to `names` the identifiers that are captured."""
    rest = 0
    for found in re.finditer(f"(?P<id>{IDENTIFIER.pattern})|(?P<variable>{VARIABLE.pattern})|(?P<any>…)", line):
        yield re.escape(line[rest : found.start()])
        rest = found.end()
        if found["id"]:
            names.append(found["id"])
            start = re.match(r"fh[a-z]+_|ed25519:|", found["id"])
            assert start is not None
            yield f"({UUID})" if re.fullmatch(UUID, found["id"]) else rf"({start[0]}[\w:+/=@.#-]+)"
        elif found["variable"]:
            yield f"(?:{VARIABLE.pattern})"
        else:
            yield ".*?"
    yield re.escape(line[rest:])
