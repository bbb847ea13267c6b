"""Settings: `farhand.toml` in the home folder, each key overridden by `FARHAND_<SECTION>_<KEY>`."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from farhand.llm.settings import ModelSettings, ProviderSettings
from farhand.protocol.errors import FarhandError

DEFAULT_PORT = 3210
FILE = "farhand.toml"


class ConfigError(FarhandError):
    """A setting that cannot be used."""


class GatewaySection(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    hosts: list[str] = []
    """Further names under which this gateway may be addressed."""
    origins: list[str] = []
    """Web pages, by origin, that may call this gateway."""
    tls_cert: str = ""
    tls_key: str = ""


class LogSection(msgspec.Struct, forbid_unknown_fields=True):
    level: str = "info"


class AgentSection(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""
    """A model of `[models]`, or `provider/model`; `FARHAND_MODEL` wins."""
    context_tokens: int = 0
    """How much of a conversation the model is sent; 0: what the model takes."""
    max_rounds: int = 100
    """Rounds of tool calls after which a run ends."""


class Config(msgspec.Struct, forbid_unknown_fields=True):
    gateway: GatewaySection = msgspec.field(default_factory=GatewaySection)
    log: LogSection = msgspec.field(default_factory=LogSection)
    agent: AgentSection = msgspec.field(default_factory=AgentSection)
    providers: dict[str, ProviderSettings] = {}
    models: dict[str, ModelSettings] = {}


def home_folder(option: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where state, settings and keys lie."""
    chosen = option or environ.get("FARHAND_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".farhand"


def make_home(home: Path) -> None:
    """Create the home, or close it to others. Raises ConfigError when that cannot be done."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"the home folder {home} cannot be used: {error.strerror}") from None


def load(home: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Raises ConfigError naming the key at fault."""
    path = home / FILE
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        values = {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    for section in msgspec.structs.fields(Config):
        if get_origin(section.type) is dict:
            continue
        for key in msgspec.structs.fields(section.type):
            name = f"FARHAND_{section.name}_{key.name}".upper()
            if name in environ:
                values.setdefault(section.name, {})[key.name] = _read(name, environ[name], key.type)
    try:
        return msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_worded(str(error))}") from None


def _read(name: str, text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind == list[str]:
        return [item for part in text.split(",") if (item := part.strip())]
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        raise ConfigError(f"{name}={text!r} is not a value of type {kind.__name__}") from None


def _worded(text: str) -> str:
    reason, _, place = text.replace("`", "'").partition(" - at ")
    place = place.strip("'").removeprefix("$").lstrip(".")
    if "unknown field" in reason:
        wrong = reason.rsplit("'", 2)[1]
        table: type = Config
        if place:
            section = place.partition("[")[0]
            table = next(field.type for field in msgspec.structs.fields(Config) if field.name == section)
            table = get_args(table)[1] if get_origin(table) is dict else table
            place = place.replace("[...]", ".*")
        known = [field.name for field in msgspec.structs.fields(table)]
        near = difflib.get_close_matches(wrong, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        return f"there is no setting {wrong!r} in {f'[{place}]' if place else 'the file'}; {hint}"
    return f"{place}: {reason}" if place else reason
