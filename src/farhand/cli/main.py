"""The command `farhand`: thin clients of the HTTP interface, plus `up`, `gateway` and `node`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import sys
import traceback
from typing import Any, Final, NoReturn

import click

from farhand import __version__
from farhand.cli.json_output import asked_for_json, json_option
from farhand.protocol.errors import FarhandError

# Each command's module is imported only when the command is used: `farhand --help` must not pay for the gateway.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "up": ("farhand.cli.run.serve:up", "Start the gateway, and lend this machine to it."),
    "gateway": ("farhand.cli.run.serve:gateway", "Start the gateway alone."),
    "node": ("farhand.cli.run.node:node", "Lend this machine to a gateway."),
    "join": ("farhand.cli.run.join:join", "Lend this machine to the gateway that made a one-time code."),
    "console": ("farhand.cli.admin.console:console", "Open the console in a browser; list and end its sessions."),
    "chat": ("farhand.cli.agent.chat:chat", "Talk to the agent."),
    "sessions": ("farhand.cli.agent.sessions:sessions", "List conversations; read, stop or renew one."),
    "call": ("farhand.cli.calls.calls:call", "Call one tool."),
    "tools": ("farhand.cli.admin.listing:tools", "List the tools that can be called."),
    "nodes": ("farhand.cli.admin.listing:nodes", "List the machines that joined."),
    "calls": ("farhand.cli.calls.calls:calls", "List what ran and what runs; show or cancel one call."),
    "approvals": ("farhand.cli.calls.approvals:approvals", "Show the calls that wait to be approved."),
    "approve": ("farhand.cli.calls.approvals:approve", "Let a call run that waits to be approved."),
    "deny": ("farhand.cli.calls.approvals:deny", "Do not let it run."),
    "policy": ("farhand.cli.admin.policy:policy", "Show the rules for calls; explain a decision; try other rules."),
    "undo": ("farhand.cli.calls.undo:undo", "Give the files a call changed their old content back."),
    "mcp": ("farhand.cli.admin.mcp:mcp", "Serve the gateway's tools to an MCP client that starts programs."),
    "ps": ("farhand.cli.calls.jobs:ps", "List the commands that run on all nodes."),
    "attach": ("farhand.cli.calls.jobs:attach", "Show what a command prints, and type to it."),
    "logs": ("farhand.cli.admin.logs:logs", "Show the log of a node."),
    "cp": ("farhand.cli.copy.command:cp", "Copy files between machines and the workspace."),
    "events": ("farhand.cli.calls.events:events", "Show the journal, live with --follow."),
    "log": ("farhand.cli.calls.log:log", "Show what happened in a session, on a node or on a day."),
    "replay": ("farhand.cli.calls.replay:replay", "Repeat a run offline, and show the first difference."),
    "audit": ("farhand.cli.admin.audit:audit", "Check that nobody changed what was written down."),
    "skills": ("farhand.cli.agent.skills:skills", "List the agent's skills; add one."),
    "config": ("farhand.cli.admin.settings:config", "Show the settings of the running gateway."),
    "memory": ("farhand.cli.agent.memory:memory", "Search and read what the agents remember."),
    "cron": ("farhand.cli.agent.cron:cron", "Schedule work for the agent, and see what became of it."),
    "message": ("farhand.cli.agent.message:message", "Send a message to somebody; show what was sent."),
    "channels": ("farhand.cli.agent.channels:channels", "List the channels; let people in; manage hooks."),
    "freeze": ("farhand.cli.admin.freeze:freeze", "Stop everything now, on every machine."),
    "thaw": ("farhand.cli.admin.freeze:thaw", "Lift a freeze."),
    "token": ("farhand.cli.admin.token:token", "Make, list and revoke tokens."),
    "backup": ("farhand.cli.admin.backup:backup", "Pack the home, its store included, into one file."),
    "restore": ("farhand.cli.admin.backup:restore", "Bring a backup back."),
    "host-wrapper": (
        "farhand.cli.admin.host_wrapper:host_wrapper",
        "Run one allowed command for a sandbox (forced by SSH).",
    ),
    "doctor": ("farhand.cli.admin.doctor:doctor", "Check this installation."),
    "bench": ("farhand.cli.admin.bench:bench", "Measure calls, commands and a copy on this machine."),
}


# They run until SIGTERM or SIGINT, which end them with status 0 also while they are still loading.
SERVERS: Final = frozenset({"up", "gateway", "node"})


class Stopped(BaseException):
    """SIGTERM or SIGINT came before the command had an event loop to handle it."""


def _stop(_number: int, _frame: object) -> NoReturn:
    raise Stopped


class Commands(click.Group):
    """Commands found by name and imported when needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in SERVERS:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _stop)
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        # Modules are there to stay: looking for garbage among them would be a tenth of what loading them takes.
        gc.disable()
        try:
            command: click.Command = getattr(importlib.import_module(module), name)
        finally:
            gc.freeze()
            gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        print(json.dumps({"version": __version__}) if asked_for_json(context) else f"farhand {__version__}")
        context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
@json_option("As with each command.", is_eager=True, expose_value=False)
def farhand() -> None:
    """Hands for an AI agent on every machine you own.

    Start with `farhand up`, then try `farhand tools` and `farhand call`.
    """


def main(args: list[str] | None = None) -> None:
    """Run a command. Mistakes end with one line, or one JSON document with --json, and never a stack trace."""
    _open_what_is_closed()
    arguments = sys.argv[1:] if args is None else args
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is shown escaped, not as a crash
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            status = _run(arguments)
            sys.stdout.flush()
        except Stopped:
            status = 0
            if as_json:
                print(json.dumps({"ready": False}), flush=True)
        except click.exceptions.Abort:
            _fail("interrupted", "interrupted", as_json, 130)
        except click.exceptions.NoArgsIsHelpError as error:
            if as_json:
                _fail("usage", "a command is missing", as_json, 2)
            print(error.format_message(), file=sys.stderr)
            raise SystemExit(2) from None
        except click.UsageError as error:
            hint = f"\nTry `{error.ctx.command_path} --help`." if error.ctx and not as_json else ""
            _fail("usage", error.format_message() + hint, as_json, 2)
        except click.ClickException as error:
            _fail("usage", error.format_message(), as_json, error.exit_code)
        except FarhandError as error:
            code = getattr(error, "code", "failed")
            _fail(code, str(error), as_json, _STATUS.get(code, 1), getattr(error, "details", None))
        except UnicodeEncodeError as error:  # of a command line that was not text
            _fail("usage", f"{error.object!r} is not UTF-8 text", as_json, 2)
        except KeyboardInterrupt:
            _fail("interrupted", "interrupted", as_json, 130)
        except OSError as error:
            if not as_json or isinstance(error, BrokenPipeError):
                raise
            _fail("failed", _told(error), as_json, 1)
        except Exception as error:
            _fail("internal", _mistake(error), as_json, 1)
    except BrokenPipeError:  # whoever read our output has left
        _write_no_more()
        raise SystemExit(141) from None
    except OSError as error:  # a full disk, most likely, and our output on it
        _write_no_more()
        print(f"farhand: {_told(error)}", file=sys.stderr)
        raise SystemExit(1) from None
    raise SystemExit(status if isinstance(status, int) else 0)


def _open_what_is_closed() -> None:
    """Of the standard streams, as with `>&-`: else whatever is opened next would be taken for one of them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


def _told(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"


def _mistake(error: Exception) -> str:
    """An error that nobody thought of, in one line that whoever mends it can use."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(str(error).split())
    return f"{type(error).__name__}: {what} (at {place.filename}:{place.lineno}); this is a mistake in Farhand"


def _write_no_more() -> None:
    """To standard output, not even by the interpreter's last flush."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> Any:
    """What the command returned. `click.main` would do, but for its own mind about pipes that were closed."""
    if "_FARHAND_COMPLETE" in os.environ:  # the shell asks for completions
        return farhand.main(args=arguments, prog_name="farhand", standalone_mode=False)
    try:
        with farhand.make_context("farhand", list(arguments)) as context:
            return farhand.invoke(context)
    except click.exceptions.Exit as left:  # --help and --version
        return left.exit_code


_STATUS: Final = {"usage": 2, "interrupted": 130}


def _fail(code: Any, message: str, as_json: bool, status: int, details: Any = None) -> NoReturn:
    if as_json:
        error = {"code": str(code), "message": message}
        print(json.dumps({"error": error if details is None else {**error, "details": details}}), flush=True)
    else:
        from farhand.cli.output import plain_lines  # noqa: PLC0415

        # Part of it may be what a node or a server says.
        print(f"farhand: {plain_lines(message)}", file=sys.stderr)
    raise SystemExit(status)
