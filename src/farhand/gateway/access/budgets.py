"""Budgets: how much tokens, agents, sessions and the whole gateway may use.

Limits come from `[budgets]` in the settings, and from the store for single subjects, which override them. The counters
are in the store: what a call reserves is committed with its intent, so that parallel calls cannot exceed a limit, on
one gateway or on several that share a store.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from farhand.gateway.access.credentials import OWNER, Credentials, Scope
from farhand.gateway.access.principal import Principal
from farhand.machine.time_zone import utc_text
from farhand.store.ports import Store, Tx
from farhand.store.tables.accounts import budgets as table
from farhand.store.tables.accounts.budgets import LARGEST, SCALE, BudgetExceeded, Limit, Period, Unit, Use, Want

ALL: Final = "all"
SCOPES: Final = ("token", "agent", "session")
LONGEST_SUBJECT: Final = 1100
# Sub-agents of sub-agents; deeper ones are not followed.
MOST_PARENTS: Final = 16
MOST_CACHED: Final = 10_000


class BudgetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one kind of subject; a limit that is absent does not apply."""

    # US dollars that model requests cost.
    money: float | None = None
    # Tokens of model requests and replies.
    tokens: int | None = None
    calls: int | None = None
    # Arguments and results of calls, files that are transferred, input and output of terminals.
    bytes: int | None = None
    # Different nodes that are used.
    machines: int | None = None
    # How long calls run, added up.
    wall_seconds: float | None = None
    # `day`: renewed at midnight UTC; `total`: never.
    period: Period = "day"


class BudgetsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Read again whenever the file changes."""

    # Everything together.
    all: BudgetSettings = BudgetSettings()
    # Each token, hook and person on a channel; not the owner.
    token: BudgetSettings = BudgetSettings()
    # Each agent.
    agent: BudgetSettings = BudgetSettings()
    # Each session, with its sub-agents.
    session: BudgetSettings = BudgetSettings(period="total")

    def limits(self, subject: str) -> dict[Unit, Limit]:
        """Return the default limits of a subject. Raises ValueError for an amount that cannot be used."""
        scope = subject.partition(":")[0]
        given: BudgetSettings = getattr(self, scope)
        amounts = {unit: getattr(given, unit.value) for unit in Unit}
        return {
            unit: Limit(subject, unit, given.period, stored_amount(unit, amount))
            for unit, amount in amounts.items()
            if amount is not None
        }

    def check(self) -> None:
        """Raise ValueError naming the setting that cannot be used."""
        for scope in (ALL, *SCOPES):
            try:
                self.limits(scope)
            except ValueError as error:
                raise ValueError(f"[budgets.{scope}] {error}") from None


_NO_LIMITS = BudgetsSection()


class Left(msgspec.Struct, frozen=True):
    """What the limits of a call leave: why it is denied, if it is, and how long it may run in milliseconds."""

    refusal: str | None = None
    wall_ms: int | None = None


class Budgets:
    """The budgets of a gateway. `load` before use."""

    def __init__(
        self,
        database: Store,
        credentials: Credentials | None,
        settings: Callable[[], BudgetsSection],
        clock: Callable[[], int],
    ) -> None:
        self._database = database
        self._credentials = credentials
        self._settings = settings
        self._clock = clock
        # By subject: the limits that were set for it.
        self._stored: dict[str, dict[Unit, Limit]] = {}
        self._parents: dict[str, str | None] = {}

    def load(self, limits: Iterable[Limit]) -> None:
        self._stored = {}
        for limit in limits:
            self._stored.setdefault(limit.subject, {})[limit.unit] = limit

    async def refresh(self) -> None:
        """Take over the limits that another gateway stored."""
        self.load(await self._database.read(table.all_limits))

    # -- which limits apply -----------------------------------------------------------------------------

    @property
    def unlimited(self) -> bool:
        return not self._stored and self._settings() == _NO_LIMITS

    async def limits(self, principal: Principal, session_key: str | None) -> tuple[Limit, ...]:
        """Return the limits that apply to what a principal does in a session."""
        if self.unlimited:
            return ()
        section = self._settings()
        subjects = [ALL, *self._credentials_of(principal), *await self._sessions_of(principal, session_key)]
        return tuple(limit for subject in subjects for limit in self._of(section, subject).values())

    def _of(self, section: BudgetsSection, subject: str) -> dict[Unit, Limit]:
        return {**section.limits(subject), **self._stored.get(subject, {})}

    def _credentials_of(self, principal: Principal) -> list[str]:
        """Return the agent and the tokens whose budgets a principal uses: its own, and those of the tokens that made
        them, so that a token gains nothing by making others."""
        found: dict[str, None] = {}
        for name in sorted(principal.ids):
            if name.startswith("agent:"):
                found[name] = None
            elif name != OWNER.id:
                chain = {name} if self._credentials is None else self._credentials.lineage(name)
                found.update(dict.fromkeys(f"token:{one}" for one in sorted(chain)))
        return list(found)

    async def _sessions_of(self, principal: Principal, session_key: str | None) -> list[str]:
        """Return the session of a call and those that started it.

        A caller without the right to chat may name any session in a call; it must not use up that session's budget.
        """
        acts = principal.actor.id.startswith("agent:") or (principal.may(Scope.CHAT) and not principal.narrowed)
        found: list[str] = []
        key = session_key if acts else None
        while key is not None and len(found) < MOST_PARENTS and f"session:{key}" not in found:
            found.append(f"session:{key}")
            if key not in self._parents:
                if len(self._parents) >= MOST_CACHED:
                    self._parents.clear()
                parent = await self._database.read(partial(table.parent_of_session, key=key))
                if parent is None:  # the session may not be stored yet
                    break
                self._parents[key] = parent
            key = self._parents[key]
        return found

    # -- using ------------------------------------------------------------------------------------------

    async def left(self, limits: Sequence[Limit], wants: Mapping[Unit, Want]) -> Left:
        """Return what is left for work that is about to start; `take` decides, also about machines."""
        now = self._clock()
        uses = await self._database.read(
            lambda tx: [table.use_of(tx, limit, now) for limit in limits if limit.unit in wants]
        )
        for use in uses:
            if use.left < wants[use.limit.unit].least:
                return Left(explain(BudgetExceeded(use, wants[use.limit.unit].least), now))
        times = [use.left for use in uses if use.limit.unit is Unit.WALL_SECONDS]
        return Left(wall_ms=min(times, default=None))

    async def take(
        self, hold: str, limits: Sequence[Limit], wants: Mapping[Unit, Want], nodes: Sequence[str] = ()
    ) -> dict[Unit, int]:
        """Reserve what work outside a call wants; return the least that is reserved of each unit.

        Raises BudgetExceeded.
        """
        operation = partial(table.take, hold=hold, limits=limits, wants=wants, nodes=nodes, now=self._clock())
        return await self._database.write(operation)

    async def settle(self, hold: str, actual: Mapping[Unit, int]) -> None:
        """Replace a reservation with what was used."""
        await self._database.write(partial(table.settle, hold=hold, actual=actual, now=self._clock()))

    async def count(self, limits: Sequence[Limit], amounts: Mapping[Unit, int]) -> str | None:
        """Count what was used; return why no more may be used, if a limit is reached."""
        operation = partial(table.add, limits=limits, amounts=amounts, now=self._clock())
        exceeded = await self._database.write(operation, durable=False)
        return None if exceeded is None else self.explain(exceeded)

    def explain(self, error: BudgetExceeded) -> str:
        return explain(error, self._clock())

    # -- showing and changing ---------------------------------------------------------------------------

    async def uses(self, only: str | None = None) -> list[Use]:
        """Return every limit and what is used of it; with `only`, those of one subject."""
        now, section = self._clock(), self._settings()

        def read(tx: Tx) -> list[Use]:
            subjects = {only} if only is not None else {ALL, *self._stored, *table.subjects_in_use(tx, now)}
            limits = [limit for subject in sorted(subjects) for limit in self._of(section, subject).values()]
            return [table.use_of(tx, limit, now) for limit in limits]

        return await self._database.read(read)

    def defaults(self) -> list[Limit]:
        """Return the limits of the settings; the subject is the kind: `token`, `agent` or `session`."""
        section = self._settings()
        return [limit for scope in SCOPES for limit in section.limits(scope).values()]

    def is_set(self, limit: Limit) -> bool:
        """Whether a limit was set for its subject, not by the settings."""
        return self._stored.get(limit.subject, {}).get(limit.unit) == limit

    def now(self) -> int:
        return self._clock()

    def is_own(self, subject: str, credential: str) -> bool:
        """Whether a subject is the credential itself, or a token that made it."""
        chain = {credential} if self._credentials is None else self._credentials.lineage(credential)
        return subject in {f"token:{name}" for name in chain}

    def is_unknown(self, subject: str) -> bool:
        """Whether a subject is a token that does not exist. Hooks and people on channels have a colon in their name."""
        scope, _, name = subject.partition(":")
        if scope != "token" or ":" in name or self._credentials is None:
            return False
        return not self._credentials.knows(name)

    async def set(self, subject: str, limits: Sequence[Limit], by: str) -> None:
        """Replace the limits that were set for a subject; none: the defaults of the settings apply again."""
        await self._database.write(partial(table.set_limits, subject=subject, limits=limits, by=by, now=self._clock()))
        await self.refresh()


def check_subject(subject: str) -> str:
    """Return the subject. Raises ValueError if it cannot be one."""
    scope, _, name = subject.partition(":")
    if subject != ALL and (scope not in SCOPES or not name):
        near = difflib.get_close_matches(scope, (ALL, *SCOPES), 1)
        hint = f"; did you mean {near[0]!r}?" if near and scope not in SCOPES else ""
        raise ValueError(f"{subject[:100]!r} is not {ALL!r}, token:ID, agent:ID or session:KEY{hint}")
    if len(subject) > LONGEST_SUBJECT or not subject.isprintable():
        raise ValueError(
            f"the subject has {len(subject)} characters; at most {LONGEST_SUBJECT} printable ones are allowed"
        )
    return subject


def limit_of(subject: str, unit: str, amount: float, period: str) -> Limit:
    """Return a limit. Raises ValueError for a unit, an amount or a period that cannot be used."""
    units = [one.value for one in Unit]
    if unit not in units:
        near = difflib.get_close_matches(unit[:40], units, 1)
        raise ValueError(
            f"there is no unit {unit[:40]!r}; {f'did you mean {near[0]!r}?' if near else ', '.join(units)}"
        )
    known: dict[str, Period] = {"day": "day", "total": "total"}
    if period not in known:
        raise ValueError(f"the period must be 'day' or 'total', not {period[:40]!r}")
    return Limit(subject, Unit(unit), known[period], stored_amount(Unit(unit), amount))


def stored_amount(unit: Unit, amount: float) -> int:
    """Return an amount as it is stored. Raises ValueError if it is negative, too large or not a number."""
    scale = SCALE.get(unit, 1)
    if not 0 <= amount <= LARGEST / scale or (scale == 1 and amount != int(amount)):
        whole = "a whole number" if scale == 1 else "a number"
        raise ValueError(f"{unit} must be {whole} from 0 to {LARGEST // scale}, not {amount:g}")
    return round(amount * scale)


def shown_amount(unit: Unit, amount: int) -> float:
    """Return a stored amount in dollars, seconds or pieces."""
    return amount / SCALE[unit] if unit in SCALE else amount


def explain(error: BudgetExceeded, now: int) -> str:
    """Return why work is denied: which limit, what is used of it, and when it renews."""
    use, limit = error.use, error.use.limit
    what = "everything together" if limit.subject == ALL else limit.subject.replace(":", " ", 1)
    per = "per day" if limit.period == "day" else "in total"
    text = f"the budget of {what} is used up: {_amount(limit.unit, use.used)} of {_amount(limit.unit, limit.amount)} "
    text += f"{_NOUNS[limit.unit]} {per} are used"
    if use.reserved:
        text += f", {_amount(limit.unit, use.reserved)} of them reserved by work that has not ended"
    if error.least > 1 and use.left:
        text += f", and this needs {_amount(limit.unit, error.least)}"
    renews_at = limit.renews_at(now)
    renews = "does not renew" if renews_at is None else f"renews at {utc_text(renews_at)}"
    return f"{text}; it {renews}, and can be raised: `farhand budget set {limit.subject} {limit.unit}=…`"


_NOUNS: Final[Mapping[Unit, str]] = {
    Unit.MONEY: "US dollars",
    Unit.TOKENS: "tokens",
    Unit.CALLS: "calls",
    Unit.BYTES: "bytes",
    Unit.MACHINES: "machines",
    Unit.WALL_SECONDS: "seconds of wall time",
}


def _amount(unit: Unit, amount: int) -> str:
    return f"{shown_amount(unit, amount):.6f}".rstrip("0").rstrip(".") if unit in SCALE else str(amount)
