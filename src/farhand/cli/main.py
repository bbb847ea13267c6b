"""The `farhand` command: finds the command's module, runs it, and reports errors."""

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
from farhand.cli.json_output import json_option, wants_json
from farhand.protocol.errors import FarhandError

# Modules are relative to farhand.cli and imported when used: `farhand --help` must not load the gateway.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "up": ("run.serve:up", "Start the gateway, with this machine as a node."),
    "gateway": ("run.serve:gateway", "Start the gateway alone."),
    "setup": ("setup.command:setup", "Set up a model, a machine, a channel and an MCP client."),
    "import": ("setup.importing:import_", "Import files, skills, schedules and sessions of OpenClaw."),
    "node": ("run.node:node", "Connect this machine to a gateway as a node."),
    "join": ("run.join:join", "Register this machine with a one-time code, and connect it."),
    "console": ("admin.console:console", "Open the console in a browser; list and end its sessions."),
    "chat": ("agent.chat:chat", "Talk to the agent."),
    "sessions": ("agent.sessions:sessions", "List sessions; read, stop, restart or fork one."),
    "call": ("calls.call:call", "Call a tool."),
    "run": ("remote.run:run", "Run a command on a node, as ssh does."),
    "shell": ("remote.shell:shell", "Open a terminal on a node, or attach to one."),
    "terminals": ("remote.shell:terminals", "List the terminals on the nodes."),
    "tools": ("admin.listing:tools", "List the tools that can be called."),
    "nodes": ("admin.listing:nodes", "List the registered nodes."),
    "migrate": ("admin.backup:migrate", "Move this home into a shared database, or back."),
    "fleet": ("admin.listing:fleet", "List the gateways that serve together."),
    "calls": ("calls.calls:calls", "List calls; show or cancel one."),
    "approvals": ("calls.approvals:approvals", "Show the calls that wait for approval."),
    "approve": ("calls.approvals:approve", "Approve a waiting call."),
    "deny": ("calls.approvals:deny", "Deny a waiting call."),
    "policy": ("admin.policy:policy", "Show the policy; explain a decision; test other rules."),
    "trial": ("calls.undo:trial", "Show, keep or discard what a trial run changed."),
    "undo": ("calls.undo:undo", "Restore the files that a call changed."),
    "mcp": ("mcp.servers:mcp", "Use MCP servers behind the gateway; serve its tools to MCP clients."),
    "ps": ("calls.jobs:ps", "List the commands that run on the nodes."),
    "attach": ("calls.jobs:attach", "Show the output of a running command, and send it input."),
    "kill": ("calls.jobs:kill", "End a command on a node, or send it a signal."),
    "logs": ("admin.listing:logs", "Show the log of a node."),
    "cp": ("copy.command:cp", "Copy files between machines and the workspace."),
    "events": ("calls.events:events", "Show the journal; live with --follow."),
    "log": ("calls.log:log", "Show the history of a session, a node or a day."),
    "replay": ("calls.replay:replay", "Repeat an agent run offline, and show the first difference."),
    "audit": ("admin.audit:audit", "Check that the journal was not changed."),
    "skills": ("agent.skills:skills", "List, add and remove skills."),
    "config": ("admin.settings:config", "Show the settings of the running gateway."),
    "memory": ("agent.memory:memory", "Search and read the agents' memory."),
    "cron": ("agent.cron:cron", "Schedule work for the agent, and see the results."),
    "message": ("agent.message:message", "Send a message on a channel; list the messages sent."),
    "channels": ("agent.channels:channels", "List channels; admit people; manage hooks."),
    "receipt": ("calls.receipt:receipt", "Export signed receipts of calls, and verify them."),
    "freeze": ("admin.freeze:freeze", "Stop everything now, on every machine."),
    "thaw": ("admin.freeze:thaw", "End a freeze."),
    "plugin": ("admin.plugin:plugin", "Start a plug-in of your own; run it while you write it."),
    "secret": ("admin.secret:secret", "Manage secrets that calls use without seeing them."),
    "token": ("admin.token:token", "Create, list and revoke tokens."),
    "budget": ("admin.budget:budget", "Show and set what tokens, agents and sessions may use."),
    "oauth": ("admin.oauth:oauth", "List and revoke programs that have access through OAuth."),
    "backup": ("admin.backup:backup", "Pack the home folder, including the store, into one file."),
    "restore": ("admin.backup:restore", "Restore a backup."),
    "host-wrapper": ("admin.host_wrapper:host_wrapper", "Run one allowed command for a sandbox (forced by SSH)."),
    "service": ("setup.service:service", "Run the gateway or the node as a service of the system."),
    "completion": ("setup.completion:completion", "Print the completion script of a shell."),
    "upgrade": ("setup.upgrade:upgrade", "Upgrade Farhand."),
    "uninstall": ("setup.upgrade:uninstall", "Remove Farhand."),
    "doctor": ("admin.doctor:doctor", "Check this installation."),
    "bench": ("admin.bench:bench", "Measure calls, commands and a copy on this machine."),
}

# These run until SIGTERM or SIGINT, and exit with status 0 even if the signal arrives while they load.
SERVERS: Final = frozenset({"up", "gateway", "node"})
EXIT_STATUS: Final = {"usage": 2, "interrupted": 130}


class StopSignal(BaseException):
    """SIGTERM or SIGINT arrived before the command had an event loop to handle it."""

    requested = False


def _stop(_number: int, _frame: object) -> NoReturn:
    # Python ignores exceptions in some places, such as the weakref callbacks of imports; the flag is checked later.
    StopSignal.requested = True
    raise StopSignal


class Commands(click.Group):
    """The commands of COMMANDS, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            import difflib  # noqa: PLC0415

            close = difflib.get_close_matches(cmd_name, COMMANDS)
            if close and not ctx.resilient_parsing:
                raise click.UsageError(f"No such command {cmd_name!r}; did you mean {' or '.join(close)}?", ctx)
            return None
        if cmd_name in SERVERS:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _stop)
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        # Modules stay in memory: collecting garbage while they load would only add a tenth to the time.
        gc.disable()
        try:
            command: click.Command = getattr(importlib.import_module(f"farhand.cli.{module}"), name)
        finally:
            gc.freeze()
            gc.enable()
        if StopSignal.requested:
            raise StopSignal
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        print(json.dumps({"version": __version__}) if wants_json(context) else f"farhand {__version__}")
        context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
@json_option("Applies to the command.", is_eager=True, expose_value=False)
def farhand() -> None:
    """Give AI agents tools on every machine you own.

    Start with `farhand up`, then try `farhand tools` and `farhand call`.
    """


def main(args: list[str] | None = None) -> None:
    """Run a command and exit. Errors are one line, or one JSON document with --json, never a traceback."""
    _replace_closed_streams()
    arguments = sys.argv[1:] if args is None else args
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Escape what the terminal cannot encode instead of failing. Write each line at once, so that output and
            # notes keep their order where both go to one pipe or file.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        try:
            status = _run(arguments)
            sys.stdout.flush()
        except StopSignal:
            status = 0
            if as_json:
                print(json.dumps({"ready": False}), flush=True)
        except (click.exceptions.Abort, KeyboardInterrupt):
            _fail("interrupted", "interrupted", as_json)
        except click.exceptions.NoArgsIsHelpError as error:
            if as_json:
                _fail("usage", "the command is missing", as_json)
            print(error.format_message(), file=sys.stderr)
            raise SystemExit(2) from None
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            hint = f"\nTry `{context.command_path} --help`." if context and not as_json else ""
            _fail("usage", error.format_message() + hint, as_json, error.exit_code)
        except FarhandError as error:
            _fail(getattr(error, "code", "failed"), str(error), as_json, details=getattr(error, "details", None))
        except UnicodeEncodeError as error:  # an argument with undecodable bytes
            _fail("usage", f"{error.object!r} is not UTF-8 text", as_json)
        except OSError as error:
            if not as_json or isinstance(error, BrokenPipeError):
                raise
            _fail("failed", _os_error(error), as_json)
        except Exception as error:
            _fail("internal", _bug(error), as_json)
    except BrokenPipeError:  # the reader of our output is gone
        _discard_output()
        raise SystemExit(141) from None
    except OSError as error:  # most likely our output is on a full disk
        _discard_output()
        print(f"farhand: {_os_error(error)}", file=sys.stderr)
        raise SystemExit(1) from None
    raise SystemExit(status if isinstance(status, int) else 0)


def _replace_closed_streams() -> None:
    """Open /dev/null for standard streams closed with `>&-`; otherwise the next file opened would take their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


def _os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"


def _bug(error: Exception) -> str:
    """Describe an unexpected exception in one line for a bug report."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(str(error).split())
    return f"{type(error).__name__}: {what} (at {place.filename}:{place.lineno}); this is a bug in Farhand"


def _discard_output() -> None:
    """Send standard output to /dev/null, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> Any:
    """Run the command and return its result. Unlike `click.main`, leaves closed pipes to the caller."""
    if "_FARHAND_COMPLETE" in os.environ:  # shell completion
        return farhand.main(args=arguments, prog_name="farhand", standalone_mode=False)
    try:
        with farhand.make_context("farhand", list(arguments)) as context:
            return farhand.invoke(context)
    except click.exceptions.Exit as exit_:  # --help and --version
        return exit_.exit_code


def _fail(code: Any, message: str, as_json: bool, status: int | None = None, *, details: Any = None) -> NoReturn:
    if as_json:
        error = {"code": str(code), "message": message}
        print(json.dumps({"error": error if details is None else {**error, "details": details}}), flush=True)
    else:
        from farhand.cli.output import plain_lines  # noqa: PLC0415

        # Part of the message may come from a node or a server.
        print(f"farhand: {plain_lines(message)}", file=sys.stderr)
    raise SystemExit(EXIT_STATUS.get(code, 1) if status is None else status)
