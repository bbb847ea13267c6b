"""`run`: one command on another machine, with its own outputs, input and exit status."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TextIO

import click

from farhand.cli.calls.resumable_streams import command_output, read_input, write
from farhand.cli.client import Client, ClientError, ConnectionLost, NoGateway, Upload
from farhand.cli.commands import Age, client_options, complete_nodes
from farhand.cli.json_output import wants_json
from farhand.cli.output import plain_lines, remark, show, show_json
from farhand.cli.remote.attach import open_terminal
from farhand.cli.remote.start import exit_status, fail, started
from farhand.protocol.errors import FarhandError

# As that of the program `timeout`.
TIMED_OUT: Final = 124
INTERRUPTED: Final = 130
INTERRUPTS: Final = 3
POLL_SECONDS: Final = 0.2


class Seconds(Age):
    """A time such as 30s or 5m; a plain number is seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        plain_number = isinstance(value, str) and value.strip().replace(".", "", 1).isdigit()
        return super().convert(f"{value.strip()}s" if plain_number else value, param, ctx)


# Options after NODE belong to the command.
@click.command(context_settings={"allow_interspersed_args": False})
@client_options
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@click.argument("words", nargs=-1, required=True, metavar="[--] CMD [ARG]...", type=click.UNPROCESSED)
@click.option("--cwd", metavar="DIR", help="Folder of the command, on the node.  [the node's workspace]")
@click.option("--env", "variables", multiple=True, metavar="K=V", help="Set a variable of the command; repeatable.")
@click.option("--timeout", type=Seconds(), metavar="TIME", help="End the command after 30s, 5m or 2h, with status 124.")
@click.option("--tty", is_flag=True, help="Run in a terminal, as `farhand shell` does.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait; print the id of the job.")
def run(
    node_id: str,
    words: tuple[str, ...],
    cwd: str | None,
    variables: tuple[str, ...],
    timeout: float | None,
    tty: bool,
    detach: bool,
    client: Client,
) -> int:
    """Run a command on a node, as ssh does.

    Its standard output and standard error arrive separately and unchanged. Standard input is passed on, unless it is a
    terminal. Ctrl-C is sent to the command; the third one cancels it. The words are passed on as they are; one word
    with blanks is a line for the login shell. Everything after NODE belongs to the command.

    The exit status is that of the command; 128+N if signal N ended it; 124 after --timeout; 125 if Farhand failed.

    \b
    Examples:
      farhand run laptop -- uname -a
      farhand run laptop -- 'cd src && make 2>&1 | tail -3'
      farhand run --cwd /srv --env LANG=C --timeout 30s laptop -- ls -l
      tar c src | farhand run laptop -- tar x -C /tmp
      farhand run --detach laptop -- make world
      farhand run --tty laptop -- htop
    """
    command, argv = command_line(words, variables)
    args: dict[str, Any] = {"command": command, "timeout": round((timeout or 0) * 1000)}
    if argv is not None:
        args["argv"] = argv
    if cwd is not None:
        args["workdir"] = cwd
    try:
        if tty:
            return open_terminal(client, node_id, args, detach=detach)
        return _detached(client, node_id, args) if detach else _Run(client, node_id, args).wait()
    except FarhandError as error:
        fail(error)


def command_line(words: tuple[str, ...], variables: tuple[str, ...]) -> tuple[str, list[str] | None]:
    """Return the command, and its words if no shell is to read it. Raises UsageError.

    Variables become part of the command, so that policy and approvals show them.
    """
    if words[0] == "--":
        words = words[1:]
    elif words[0].startswith("-"):
        raise click.UsageError(f"{words[0]} comes after NODE, so it is not an option of run; write it before NODE.")
    if not words or not words[0]:
        raise click.UsageError("the command is missing.")
    for variable in variables:
        name, equals, _ = variable.partition("=")
        if not equals or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise click.UsageError(f"--env takes NAME=VALUE, not {variable!r}.")
    if len(words) == 1 and any(character.isspace() for character in words[0]):
        settings = [f"{name}={shlex.quote(value)}" for name, _, value in (one.partition("=") for one in variables)]
        return (f"export {' '.join(settings)}; " if settings else "") + words[0], None
    argv = ["env", *variables, *words] if variables else list(words)
    return shlex.join(argv), argv


def _detached(client: Client, node_id: str, args: dict[str, Any]) -> int:
    body = {"tool": f"{node_id}__Bash", "args": {**args, "background": True}}
    ended = started(client, body, ask=not wants_json())
    if not ended["ok"]:
        raise ClientError(ended["error"]["kind"], ended["error"]["message"])
    job_id = ended["result"]["sessionId"]
    show({"job_id": job_id, "call_id": ended["request_id"], "node_id": node_id}, job_id)
    return 0


class _Run:
    """One command in the foreground."""

    def __init__(self, client: Client, node_id: str, args: dict[str, Any]) -> None:
        self._client = client
        self._node_id = node_id
        self._body = {"tool": f"{node_id}__Bash", "args": {**args, "attached": True}}
        self._call_id = ""
        self._streams: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._running = threading.Event()
        self._interrupts = 0
        self._quiet = wants_json()

    def wait(self) -> int:
        """Run the command and return the exit status of this program. Raises ClientError."""
        before = signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        ended: list[Any] = []
        try:
            # Signals reach the main thread only while it waits for something that they interrupt.
            caller = _thread(lambda: ended.append(self._called()), self._failures)
            while caller.is_alive():
                caller.join(POLL_SECONDS)
                if self._failures:
                    raise self._failures[0]
            for stream in self._streams:
                while stream.is_alive():
                    stream.join(POLL_SECONDS)
            if self._failures:
                raise self._failures[0]
        except _Cancelled:
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGINT, before)
        return self._status(ended[0])

    def _called(self) -> dict[str, Any]:
        try:
            return started(self._client, self._body, self._begin, ask=not self._quiet)
        except (ConnectionLost, NoGateway):
            if not self._running.is_set():
                raise
        return self._look_up()

    def _look_up(self) -> dict[str, Any]:
        """Return the end of the call after the connection was lost: the command has gone on without it."""
        while True:
            with contextlib.suppress(ConnectionLost, NoGateway):
                record = self._client.get("/v1/calls/{}", self._call_id).value
                if record["state"] not in ("running", "waiting"):
                    return {**record, "ok": record["state"] == "ok"}
            time.sleep(POLL_SECONDS)

    def _begin(self, call_id: str) -> None:
        """Start to pass the outputs on; the input follows when the command has started."""
        self._call_id = call_id
        outputs = (("output", sys.stdout), ("errors", sys.stderr))
        for name, to in () if self._quiet else outputs:
            self._streams.append(_thread(partial(self._pass_on, name, to), self._failures))
        if self._quiet:
            self._send_when_running()

    def _pass_on(self, stream: str, to: TextIO) -> None:
        begun = self._send_when_running if stream == "output" else lambda: None
        path = f"/v1/calls/{self._call_id}/output"
        try:
            for piece in command_output(self._client, path, stream=stream, begun=begun, connected=True):
                write(piece, to)
        except (ConnectionLost, NoGateway):
            raise
        except ClientError as error:
            if error.code != "not_found":  # the call was refused, so that there is no command
                raise

    def _send_when_running(self) -> None:
        if not self._running.is_set():
            self._running.set()
            threading.Thread(target=self._send_input, daemon=True).start()

    def _send_input(self) -> None:
        pieces = iter(()) if sys.stdin.isatty() else iter(read_input, b"")
        try:
            with (
                self._client.open("POST", f"/v1/calls/{self._call_id}/input", Upload(None, pieces), seconds=None) as (
                    response,
                    explained,
                ),
                explained,
            ):
                response.read()
        except ConnectionLost as error:
            remark(f"farhand: {error}; the command gets no more input")
        except ClientError:
            pass  # the command ended without reading all of it

    def _interrupt(self) -> None:
        """Send SIGINT to the command; it is up to the command to end."""
        self._interrupts += 1
        if self._interrupts >= INTERRUPTS or not self._running.is_set():
            if self._call_id:
                with contextlib.suppress(ClientError):
                    self._client.delete("/v1/calls/{}", self._call_id)
            raise _Cancelled
        threading.Thread(target=self._send_interrupt, daemon=True).start()

    def _send_interrupt(self) -> None:
        args = {"action": "kill", "sessionId": self._call_id, "signal": "INT"}
        try:
            self._client.invoke(f"{self._node_id}__Process", args)
        except ClientError as error:
            remark(f"farhand: Ctrl-C was not passed on: {plain_lines(str(error))}")

    def _status(self, ended: dict[str, Any]) -> int:
        if not ended["ok"]:
            if ended.get("state") == "timeout":
                return TIMED_OUT
            raise ClientError(ended["error"]["kind"], ended["error"]["message"])
        result = ended["result"]
        if self._quiet:
            known = ("exitCode", "signal", "timedOut", "durationMs", "stderr", "truncated", "workdir")
            shown = {name: result.get(name) for name in known}
            show_json({"call_id": self._call_id, "node_id": self._node_id, "stdout": result["output"], **shown})
        if result["timedOut"]:
            if not self._quiet:
                remark("farhand: the command was ended after --timeout")
            return TIMED_OUT
        return exit_status(result["exitCode"], result["signal"])


class _Cancelled(BaseException):
    """Ctrl-C ended the call itself."""


def _thread(work: Callable[[], object], failures: list[BaseException]) -> threading.Thread:
    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    return thread
