"""Assembly of OAuth for `/mcp`."""

from __future__ import annotations

from collections.abc import Callable

from farhand.api.oauth.consent import ConsentRoutes, consent_page_routes
from farhand.api.oauth.endpoints import EndpointRoutes
from farhand.api.server.public_url import PublicUrl
from farhand.api.server.router import Route, routes_of
from farhand.config import SettingsError
from farhand.gateway.access.credentials import Credentials
from farhand.gateway.access.oauth import OAuth
from farhand.gateway.access.oauth_clients import ClientDocuments
from farhand.gateway.access.tokens import Tokens
from farhand.gateway.journal import EventJournal
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.store.ports import Store


def open_oauth(
    database: Store, journal: EventJournal, credentials: Credentials, tokens: Tokens, clock: Callable[[], int]
) -> OAuth:
    return OAuth(database, journal, credentials, tokens, ClientDocuments(), clock=clock)


def oauth_routes(oauth: OAuth, node_registry: NodeRegistry, public_url: PublicUrl) -> list[Route]:
    doors = routes_of(EndpointRoutes(oauth, public_url), ConsentRoutes(oauth, node_registry, public_url))
    return [*doors, *consent_page_routes()]


def read_public_url(setting: str) -> PublicUrl:
    """Return the public address of the settings. Raises SettingsError."""
    try:
        return PublicUrl(setting)
    except ValueError as error:
        raise SettingsError(str(error)) from None
