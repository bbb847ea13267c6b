"""`/v1/secrets`: names, restrictions and last use of secrets; never a value."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.api.server.http import Request, copied, refusing, unknown
from farhand.api.server.router import route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.access.secrets import Secrets
from farhand.gateway.nodes.egress import ProxyCredentials
from farhand.protocol.redaction import MIN_SECRET_CHARS
from farhand.store.tables.access.secrets import SecretRecord

NOT_MASKED: Final = (
    f"the value is not masked if a command prints it: it has fewer than {MIN_SECRET_CHARS} characters or digits only. "
    "Use a longer one, or keep it out of output"
)


class SecretRequest(msgspec.Struct, forbid_unknown_fields=True):
    value: str
    # The nodes that may get it; empty: all.
    nodes: list[str] = []
    # Patterns (`ci__*`) of the tools whose calls may use it; empty: all.
    tools: list[str] = []
    # Only as a header of requests to these hosts, added by the egress proxies of `nodes`: commands never hold it.
    hosts: list[str] = []
    # With `{}` in the place of the value; default: `Authorization: Bearer {}`.
    header: str = ""


class SecretShown(msgspec.Struct):
    name: str
    nodes: list[str]
    tools: list[str]
    hosts: list[str]
    header: str | None
    made_by: str
    created_at: int
    last_used_at: int | None
    # The call that used it last.
    last_call: str | None
    # Whether the value is masked in answers, records and logs: not if it is short or a number.
    masked: bool
    warning: str | None = None


class SecretsAnswer(msgspec.Struct):
    secrets: list[SecretShown]
    count: int


class SecretRoutes:
    def __init__(self, secrets: Secrets, proxies: ProxyCredentials) -> None:
        self._secrets = secrets
        self._proxies = proxies

    @route("GET /v1/secrets", Scope.ADMIN, "Names, restrictions and last use of secrets; never a value.")
    async def listed(self, _request: Request) -> SecretsAnswer:
        found = [self._shown(record) for record in await self._secrets.all()]
        return SecretsAnswer(found, len(found))

    @route("PUT /v1/secrets/{name}", Scope.ADMIN, "Set a secret.")
    async def put(self, request: Request, wanted: SecretRequest) -> SecretShown:
        with refusing(ValueError):
            if wanted.hosts:
                self._proxies.check(wanted.nodes)
            record = await self._secrets.put(
                request.params["name"],
                wanted.value,
                wanted.nodes,
                wanted.tools,
                request.credential.id,
                hosts=wanted.hosts,
                header=wanted.header,
            )
        await self._proxies.changed()
        return self._shown(record)

    @route("DELETE /v1/secrets/{name}", Scope.ADMIN, "Remove a secret.")
    async def remove(self, request: Request) -> dict[str, str]:
        name = request.params["name"]
        if not await self._secrets.remove(name, request.credential.id):
            raise unknown("secret", name)
        await self._proxies.changed()
        return {"removed": name}

    def _shown(self, record: SecretRecord) -> SecretShown:
        masked = self._secrets.is_masked(record)
        return copied(
            SecretShown,
            record,
            nodes=record.nodes.split(),
            tools=record.tools.split(),
            hosts=record.hosts.split(),
            header=record.header or None,
            masked=masked,
            warning=None if masked else NOT_MASKED,
        )
