"""`budget`: what tokens, agents, sessions and the whole gateway may use, and have used."""

from __future__ import annotations

import difflib
import re
from typing import Any, Final

import click

from farhand.cli.client import Client, url_path
from farhand.cli.commands import client_group
from farhand.cli.output import Column, minute_time, plain, remark, show, show_table

UNITS: Final = ("money", "tokens", "calls", "bytes", "machines", "wall_seconds")


class BudgetLimit(click.ParamType):  # type: ignore[type-arg]
    """An argument such as calls=100/day, passed as the JSON of the API."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        found = re.fullmatch(r"([a-z_]+)=(\d+(?:\.\d+)?)(?:/([a-z]+))?", value.strip().lower())
        if found is None:
            self.fail(f"{value!r} is not a limit; write UNIT=AMOUNT/day or UNIT=AMOUNT/total.", param, ctx)
        unit, amount, period = found[1], float(found[2]), found[3] or "day"
        if unit not in UNITS:
            near = difflib.get_close_matches(unit, UNITS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(UNITS)}."
            self.fail(f"there is no unit {unit!r}; {hint}", param, ctx)
        if period not in ("day", "total"):
            self.fail(f"the period must be day or total, not {period!r}.", param, ctx)
        return {"unit": unit, "amount": int(amount) if amount.is_integer() else amount, "period": period}


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


COLUMNS = [
    Column("BUDGET OF", "subject", flexible=True),
    Column("UNIT", "unit"),
    Column("USED", lambda entry: _number(entry["used"])),
    Column("LIMIT", lambda entry: _number(entry["limit"])),
    Column("PER", "period"),
    Column("RENEWS", lambda entry: minute_time(entry["renews_at"])),
    Column("FROM", "source"),
]
DEFAULT_COLUMNS = [
    Column("EACH", "scope"),
    Column("UNIT", "unit"),
    Column("LIMIT", lambda entry: _number(entry["limit"])),
    Column("PER", "period"),
]


def _show(answer: dict[str, Any]) -> None:
    if answer["budgets"]:
        show_table(COLUMNS, answer["budgets"])
    if answer["defaults"]:
        remark("\nLimits of the settings:")
        show_table(DEFAULT_COLUMNS, answer["defaults"])
    if not answer["budgets"] and not answer["defaults"]:
        remark("no limits; set some with `farhand budget set`, or [budgets] in farhand.toml")


@client_group
@click.option("--of", "subject", metavar="SUBJECT", help="Only this one: all, token:ID, agent:ID or session:KEY.")
def budget(subject: str | None, client: Client) -> None:
    """Show and set budgets: what may be used, and what is used.

    Without a command: list them. Units: money (US dollars), tokens, calls, bytes, machines, wall_seconds. A daily
    budget renews at midnight UTC.

    \b
    Examples:
      farhand budget
      farhand budget set agent:main money=5/day tokens=2000000/day
      farhand budget set token:1a2b3c4d calls=100/total
      farhand budget clear agent:main
    """
    show(client.get(url_path("/v1/budgets", subject=subject)), _show)


@budget.command("set")
@click.argument("subject")
@click.argument("limits", nargs=-1, required=True, type=BudgetLimit(), metavar="LIMIT...")
def set_(subject: str, limits: tuple[dict[str, Any], ...], client: Client) -> None:
    """Set the limits of all, token:ID, agent:ID or session:KEY. They replace those set before.

    \b
    Example:
      farhand budget set agent:main money=5/day calls=1000/day
    """
    show(client.put("/v1/budgets", {"subject": subject, "limits": list(limits)}), _show)


@budget.command("clear")
@click.argument("subject")
def clear(subject: str, client: Client) -> None:
    """Remove the limits that were set; those of the settings apply again.

    \b
    Example:
      farhand budget clear agent:main
    """
    show(client.put("/v1/budgets", {"subject": subject, "limits": []}), lambda _: print(plain(f"cleared: {subject}")))
