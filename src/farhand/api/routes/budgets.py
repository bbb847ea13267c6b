"""`/v1/budgets`: what tokens, agents, sessions and the whole gateway may use, and have used."""

from __future__ import annotations

import msgspec

from farhand.api.routes.tokens import TokenLimit, limits_of
from farhand.api.server.http import Problem, Request, refusing
from farhand.api.server.router import Query, route
from farhand.gateway.access.budgets import Budgets, check_subject, shown_amount
from farhand.gateway.access.credentials import Scope


class BudgetShown(msgspec.Struct):
    """A limit, and what is used of it in the present period; amounts are in dollars, seconds or pieces."""

    # `all`, `token:ID`, `agent:ID` or `session:KEY`.
    subject: str
    unit: str
    period: str
    limit: float
    # Including what is reserved.
    used: float
    # By calls and model requests that have not ended.
    reserved: float
    left: float
    # Milliseconds since 1970; null: it does not renew.
    renews_at: int | None
    # `settings`, or `set` for this subject.
    source: str


class BudgetDefault(msgspec.Struct):
    """A limit of the settings for each token, agent or session."""

    scope: str
    unit: str
    period: str
    limit: float


class BudgetsAnswer(msgspec.Struct):
    budgets: list[BudgetShown]
    defaults: list[BudgetDefault]


class BudgetRequest(msgspec.Struct, forbid_unknown_fields=True):
    subject: str
    # They replace those that were set for the subject; empty: the defaults of the settings apply again.
    limits: list[TokenLimit]


_SUBJECT = Query("subject", "Only this one: `all`, `token:ID`, `agent:ID` or `session:KEY`.")


class BudgetRoutes:
    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets

    @route(
        "GET /v1/budgets",
        (Scope.READ, Scope.CHAT, Scope.TOOLS_READ),
        "Limits, and what is used of them: all for `admin`, else the credential's own.",
        query=(_SUBJECT,),
        narrow=True,
    )
    async def listed(self, request: Request) -> BudgetsAnswer:
        admin = request.principal.may(Scope.ADMIN)
        only = request.query("subject")
        if not admin:
            own = f"token:{request.credential.id}"
            if only not in (None, own):
                raise Problem(403, "forbidden", f"this credential may only see its own budget, {own!r}")
            only = own
        if only is not None:
            with refusing(ValueError):
                check_subject(only)
        defaults = [
            BudgetDefault(limit.subject, limit.unit.value, limit.period, shown_amount(limit.unit, limit.amount))
            for limit in (self._budgets.defaults() if admin else ())
        ]
        return BudgetsAnswer(await self._uses(only), defaults)

    @route("PUT /v1/budgets", Scope.ADMIN, "Set the limits of one subject.", errors=(404,))
    async def put(self, request: Request, wanted: BudgetRequest) -> BudgetsAnswer:
        with refusing(ValueError):
            subject = check_subject(wanted.subject)
        if self._budgets.is_own(subject, request.credential.id):
            raise Problem(403, "forbidden", f"a token cannot change its own budget, or that of its maker ({subject})")
        with refusing(ValueError):
            limits = limits_of(subject, wanted.limits)
        if limits and self._budgets.is_unknown(subject):
            raise Problem(404, "not_found", f"there is no {subject}; `farhand token list` shows the ids of tokens")
        await self._budgets.set(subject, limits, request.credential.id)
        return BudgetsAnswer(await self._uses(subject), [])

    async def _uses(self, subject: str | None) -> list[BudgetShown]:
        now = self._budgets.now()
        return [
            BudgetShown(
                use.limit.subject,
                use.limit.unit.value,
                use.limit.period,
                shown_amount(use.limit.unit, use.limit.amount),
                shown_amount(use.limit.unit, use.used),
                shown_amount(use.limit.unit, use.reserved),
                shown_amount(use.limit.unit, use.left),
                use.limit.renews_at(now),
                "set" if self._budgets.is_set(use.limit) else "settings",
            )
            for use in await self._budgets.uses(subject)
        ]
