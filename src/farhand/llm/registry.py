"""Resolve model names."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from farhand.llm.anthropic import AnthropicModel
from farhand.llm.errors import NotConfigured
from farhand.llm.fallback import FallbackModel
from farhand.llm.http_model import Connections
from farhand.llm.model import Model
from farhand.llm.openai import OpenAIModel
from farhand.llm.recording import ReplayModel
from farhand.llm.retry import RetryingModel, RetryPolicy
from farhand.llm.settings import PROVIDERS, ModelSettings, Prices, ProviderSettings, prices_of
from farhand.protocol.errors import FarhandError
from farhand.protocol.secret_handles import MARK

log = logging.getLogger(__name__)

DEFAULT_PROVIDER = OPENAI = "openai"
# Makes a model from its full name, its name at the provider, both settings, the key, and shared connections.
MakeModel = Callable[[str, str, ProviderSettings, ModelSettings, str, Connections], Model]
REPLAY = "replay:"
RETRIES_BEFORE_FALLBACK = 2
UNSET = (
    "No model is set up: run `farhand setup`, or set FARHAND_MODEL to a model's name, with OPENAI_API_KEY for OpenAI "
    "or OPENAI_BASE_URL for any compatible server (LM Studio, Ollama, vLLM), or name one under [agent] model in "
    "farhand.toml."
)


class ModelChoice(msgspec.Struct, frozen=True):
    """The settings of models; see `Models`."""

    providers: Mapping[str, ProviderSettings] = {}
    models: Mapping[str, ModelSettings] = {}
    default: str = ""
    others: tuple[str, ...] = ()


class Models:
    """The models of a gateway, by name. Each is built at its first use; `close` ends their connections."""

    def __init__(
        self,
        *,
        providers: Mapping[str, ProviderSettings] | None = None,
        models: Mapping[str, ModelSettings] | None = None,
        default: str = "",
        others: Iterable[str] = (),
        environ: Mapping[str, str] | None = None,
        policy: Callable[[ProviderSettings], RetryPolicy] | None = None,
        apis: Mapping[str, Callable[[], MakeModel]] | None = None,
        current: Callable[[], ModelChoice] | None = None,
        resolved: Callable[[str, ProviderSettings], ProviderSettings] | None = None,
        secrets_version: Callable[[], int] = lambda: 0,
    ) -> None:
        """Configure the models.

        `default` applies if `FARHAND_MODEL` is not in the environment; `others` are further names in the settings, such
        as those of agents. `apis` load the interfaces for `[providers.NAME] api`; each is also a provider of its own
        name. `current` returns the settings in force instead of the four; a request uses those of its beginning.
        `resolved` puts the values of secrets into the settings of a provider, by its name; it raises NotConfigured.
        `secrets_version` changes with the secrets.
        """
        self._environ = environ or {}
        self._apis = apis or {OPENAI: lambda: OpenAIModel, "anthropic": lambda: AnthropicModel}
        fixed = ModelChoice(providers or {}, models or {}, default, tuple(others))
        self._current = current or (lambda: fixed)
        self._choice: ModelChoice | None = None
        self._resolved = resolved or _without_secrets
        self._secrets_version = secrets_version
        self._version = -1
        self._policy = policy or (lambda provider: RetryPolicy(retries=provider.retries))
        self._connections = Connections()
        self._built: dict[str, Model] = {}
        self._refresh()

    def _refresh(self) -> None:
        """Use the settings in force; models that were built from others are built again."""
        choice, version = self._current(), self._secrets_version()
        if version != self._version:
            self._built, self._version = {}, version
        if choice is self._choice:
            return
        if choice != self._choice:
            own = {name: ProviderSettings(api=name) for name in self._apis if name != OPENAI}
            self._providers = {**own, **_with_defaults(choice.providers, self._environ)}
            self._settings = dict(choice.models)
            self._default = self._environ.get("FARHAND_MODEL", "").strip() or choice.default
            self._others = [name for name in choice.others if name]
            self._built = {}
        self._choice = choice

    @property
    def default(self) -> str:
        """Return the name of the default model; empty if none is set."""
        self._refresh()
        return self._default

    @property
    def listed(self) -> list[str]:
        """Return the configured names, the default first."""
        self._refresh()
        fallbacks = [name for settings in self._settings.values() for name in settings.fallback]
        default = [self._default] if self._default else []
        return list(dict.fromkeys([*default, *self._settings, *self._others, *fallbacks]))

    def chosen(self, name: str = "") -> Model:
        """Return the model that a caller requests: a configured one, or the default. Raises NotConfigured.

        The name is only compared with those in the settings, never resolved: `replay:` names a file on the gateway's
        host, and a provider charges for every model it has.
        """
        wanted = name.strip()
        if wanted and wanted not in self.listed:
            place = self._place_of(wanted)
            known = [one for one in self.listed if not one.startswith(REPLAY)]
            if wanted.startswith(REPLAY) or place not in map(self._place_of, known):
                raise NotConfigured(_unknown(wanted, known))
        return self.named(wanted)

    def named(self, name: str = "") -> Model:
        """Return the model of that name, or the default. Raises NotConfigured. For names from the settings: see
        `chosen`.
        """
        self._refresh()
        wanted = name.strip() or self._default
        if not wanted:
            raise NotConfigured(UNSET)
        if wanted not in self._built:
            self._built[wanted] = self._build(wanted)
        return self._built[wanted]

    def prices(self, name: str = "") -> Prices:
        """Return the prices of a model, or of the default; of a fallback chain, the highest."""
        self._refresh()
        wanted = name.strip() or self._default
        names = [wanted, *self._settings_of(wanted).fallback]
        found = [prices_of(self._settings_of(one), self._place_of(one)[1]) for one in names]
        return Prices(*(max(getattr(one, field) for one in found) for field in Prices.__struct_fields__))

    def server(self) -> tuple[str, str]:
        """Return address and key of the default model's provider, for its other services; both may be empty."""
        self._refresh()
        name = self._place_of(self._default)[0]
        provider = self._providers.get(name, ProviderSettings())
        try:
            provider = self._resolved(name, provider)
        except NotConfigured as error:
            log.warning("the other services of the provider %s get no key: %s", name, error)
            provider = msgspec.structs.replace(provider, api_key="")
        return provider.base_url, provider.api_key or self._environ.get(provider.api_key_env, "")

    async def close(self) -> None:
        await self._connections.close()

    def _build(self, name: str) -> Model:
        if name.startswith(REPLAY):
            return ReplayModel(name, Path(name.removeprefix(REPLAY)).expanduser())
        settings = self._settings_of(name)
        names = list(dict.fromkeys([name, *settings.fallback]))
        chain = [self._one(member, last=member == names[-1]) for member in names]
        return FallbackModel(chain) if len(chain) > 1 else chain[0]

    def _one(self, name: str, *, last: bool) -> Model:
        if name.startswith(REPLAY):
            return self._build(name)
        provider_name, model = self._place_of(name)
        provider = self._providers.get(provider_name)
        if provider is None or (provider.api == OPENAI and not provider.base_url):
            known = ", ".join(sorted(self._providers))
            raise NotConfigured(
                f"The model {name!r} names the provider {provider_name!r}, which has no base_url: add "
                f"[providers.{provider_name}] to farhand.toml, or use one of {known}."
            )
        built_in = provider is PROVIDERS.get(provider_name)
        provider = self._resolved(provider_name, provider)
        api_key = provider.api_key or self._environ.get(provider.api_key_env, "")
        if not api_key and built_in and provider.base_url.startswith("https:"):
            raise NotConfigured(f"The model {name!r} needs a key: set {provider.api_key_env} in the environment.")
        settings = self._settings_of(name)
        full = name if name in self._settings and "/" not in name else f"{provider_name}/{model}"
        asked = self._api(name, provider)(full, model, provider, settings, api_key, self._connections)
        policy = self._policy(provider)
        if not last:
            policy = msgspec.structs.replace(policy, retries=min(policy.retries, RETRIES_BEFORE_FALLBACK))
        return RetryingModel(asked, policy)

    def _api(self, name: str, provider: ProviderSettings) -> MakeModel:
        try:
            return self._apis[provider.api]()
        except KeyError:
            known = ", ".join(sorted(self._apis))
            raise NotConfigured(f"The model {name!r} needs the api {provider.api!r}; known: {known}.") from None
        except FarhandError as error:
            raise NotConfigured(f"The model {name!r} cannot be used: {error}") from None

    def _settings_of(self, name: str) -> ModelSettings:
        provider, model = self._place_of(name)
        for key in (name, f"{provider}/{model}", model):
            if key in self._settings:
                return self._settings[key]
        return ModelSettings()

    def _place_of(self, name: str) -> tuple[str, str]:
        """Return provider and model of a name: by its table in `[models]`, as `provider/model`, or at the default
        provider.
        """
        settings = self._settings.get(name)
        if settings is not None and settings.provider:
            return settings.provider, settings.model or name.removeprefix(f"{settings.provider}/")
        chosen = settings.model if settings is not None and settings.model else name
        provider, slash, model = chosen.partition("/")
        if slash and model and provider in self._providers:
            return provider, model
        return DEFAULT_PROVIDER, chosen


def _without_secrets(name: str, provider: ProviderSettings) -> ProviderSettings:
    for text in (provider.base_url, provider.api_key, *provider.headers.values()):
        if MARK.decode() in text:
            raise NotConfigured(f"[providers.{name}] names a secret, which only the running gateway can read.")
    return provider


def _unknown(name: str, known: list[str]) -> str:
    if not known:
        return f"There is no model {name[:100]!r} here, and no other is set up: leave the model out."
    near = difflib.get_close_matches(name[:100], known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    choices = ", ".join(known[:20])
    return (
        f"There is no model {name[:100]!r} here.{hint} Choose one of: {choices}; [models] in farhand.toml adds others."
    )


def _with_defaults(given: Mapping[str, ProviderSettings], environ: Mapping[str, str]) -> dict[str, ProviderSettings]:
    providers = {**PROVIDERS, **{name: _over(PROVIDERS.get(name), settings) for name, settings in given.items()}}
    # The standard variable sets the address of the standard provider, unless the file does.
    base_url = environ.get("OPENAI_BASE_URL", "").strip()
    if base_url and not (DEFAULT_PROVIDER in given and given[DEFAULT_PROVIDER].base_url):
        providers[DEFAULT_PROVIDER] = msgspec.structs.replace(providers[DEFAULT_PROVIDER], base_url=base_url)
    return providers


def _over(below: ProviderSettings | None, above: ProviderSettings) -> ProviderSettings:
    if below is None:
        return above
    return ProviderSettings(
        api=above.api,
        base_url=above.base_url or below.base_url,
        api_key=above.api_key or ("" if above.api_key_env else below.api_key),
        api_key_env=above.api_key_env or below.api_key_env,
        headers={**below.headers, **above.headers},
        retries=above.retries,
    )
