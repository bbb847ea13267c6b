"""Decorators that declare commands which are clients of a gateway."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

import click

from farhand.cli.client import Client, ClientError, url_path
from farhand.cli.json_output import group_json_option, json_option

Function = Callable[..., Any]

# How long a shell waits for a completion.
COMPLETION_SECONDS: Final = 2.0
SECONDS_PER_UNIT: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def client_options(function: Function, *, address: bool = True) -> Function:
    """Give a command --json, --home and --url, and pass it a `client`. Groups hand --home and --url down.

    Without `address`, the command has a --url with another meaning.
    """

    @functools.wraps(function)
    def run(*args: Any, home: str | None, **options: Any) -> Any:
        url = options.pop("url") if address else None
        context = click.get_current_context().parent
        while context is not None:
            home, url = home or context.params.get("home"), url or context.params.get("url")
            context = context.parent
        return function(*args, client=Client(home, url), **options)

    # Click lists options in the order of this list, reversed: these come last in the help.
    own_options = run.__dict__.pop("__click_params__", [])
    if address:
        click.option("--url", metavar="URL", help="Address of the gateway.  [FARHAND_URL, with FARHAND_TOKEN]")(run)
    for option in (
        click.option(
            "--home", type=click.Path(file_okay=False), help="Home of the gateway.  [FARHAND_HOME, ~/.farhand]"
        ),
        json_option(expose_value=False),
    ):
        option(run)
    run.__dict__["__click_params__"] += own_options
    return run


def client_command(function: Function) -> click.Command:
    """Declare a command with the options of every client; it is called with a `client`."""
    return click.command()(client_options(function))


class ClientGroup(click.Group):
    """A group whose subcommands are client commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            import difflib  # noqa: PLC0415

            near = difflib.get_close_matches(name, self.list_commands(ctx))
            if near:
                raise click.UsageError(f"No such command {name!r}; did you mean {' or '.join(near)}?", ctx)
        return super().resolve_command(ctx, args)

    def command(  # type: ignore[override]
        self, name: str | None = None, *, address: bool = True
    ) -> Callable[[Function], click.Command]:
        def declare(function: Function) -> click.Command:
            return click.Group.command(self, name)(client_options(function, address=address))

        return declare

    def client_group(self, function: Function) -> ClientGroup:
        group = client_group(function)
        self.add_command(group)
        return group

    def add_alias(self, name: str, text: str) -> None:
        """Add a subcommand that does what the group does without one."""
        self.add_command(click.Command(name, params=self.params, callback=self.callback, help=text))


def client_group(function: Function) -> ClientGroup:
    """Declare a group that calls `function` when no subcommand is given."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if click.get_current_context().invoked_subcommand is None:
            return function(*args, **options)
        return None

    declare = click.group(cls=ClientGroup, invoke_without_command=True, subcommand_metavar="[COMMAND]")
    return declare(client_options(run))


def command_group(function: Function) -> ClientGroup:
    """Declare a group that needs a subcommand."""
    return click.group(cls=ClientGroup)(group_json_option(function))


class Age(click.ParamType):  # type: ignore[type-arg]
    """An option that takes an age such as 90s, 15m, 2h, 7d or 2w, and passes seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", value.strip().lower())
        if found is None:
            self.fail(f"{value!r} is not an age; write 90s, 15m, 2h, 7d or 2w.", param, ctx)
        return float(found[1]) * SECONDS_PER_UNIT[found[2]]


def options_given(**options: Any) -> dict[str, Any]:
    """Return the options that have a value, for a request in which the others must be absent."""
    return {name: value for name, value in options.items() if value is not None}


# -- shell completion ---------------------------------------------------------------------------------------


def complete_nodes(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Return the ids of nodes that begin with what was typed."""
    return [one["node_id"] for one in _known(context, "/v1/nodes", "nodes") if one["node_id"].startswith(typed)]


def complete_tools(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Return the names of tools that begin with what was typed."""
    return [one["name"] for one in _known(context, "/v1/tools", "tools") if one["name"].startswith(typed)]


def complete_parameters(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Return the parameters of the tool that was typed before, as `path=`."""
    tool = str(context.params.get("tool") or "")
    offers = _known(context, url_path("/v1/tools", name=tool), "tools") if tool else []
    properties = offers[0]["parameters"].get("properties") if len(offers) == 1 else None
    names = properties if isinstance(properties, dict) else {}
    return [f"{name}=" for name in names if name.startswith(typed) and name.isidentifier()]


def _known(context: click.Context, path: str, key: str) -> list[dict[str, Any]]:
    """Return what a gateway lists; nothing if none answers, since a completion must not print errors."""
    client = Client(context.params.get("home"), context.params.get("url"))
    try:
        found: list[dict[str, Any]] = client.request("GET", path, seconds=COMPLETION_SECONDS).value[key]
    except (ClientError, KeyError, TypeError):
        return []
    return [one for one in found if all(str(one.get(name, "")).isprintable() for name in ("node_id", "name"))]
