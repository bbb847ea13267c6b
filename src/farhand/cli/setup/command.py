"""`setup`: the first configuration. Each part is tested before it is written."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import click
import msgspec

from farhand import config
from farhand.app.model_check import ask_once
from farhand.cli.client import Client, ClientError
from farhand.cli.commands import client_command
from farhand.cli.json_output import wants_json
from farhand.cli.mcp import install as mcp_install
from farhand.cli.output import plain_lines, remark, show_json
from farhand.cli.run import pair
from farhand.cli.setup.settings_file import Changes, changed_text, write_settings
from farhand.llm.probe import ProbeResult
from farhand.llm.registry import DEFAULT_PROVIDER
from farhand.llm.settings import PROVIDERS, ProviderSettings
from farhand.machine.home import make_home

OTHER: Final = "other"
# The name of a provider that is known only by its address.
CUSTOM: Final = "custom"
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SUGGESTED: Final = {"openai": "gpt-5-mini", "openrouter": "openai/gpt-5-mini", "ollama": "qwen3", "lmstudio": "qwen3"}


@client_command
@click.option("--model", metavar="NAME", help="Model, such as gpt-5-mini or ollama/qwen3.")
@click.option("--base-url", metavar="URL", help="Address of an OpenAI-compatible server, up to and including /v1.")
@click.option("--api-key-env", metavar="VAR", help="Environment variable with the key.")
@click.option("--yes", is_flag=True, help="Ask nothing.")
def setup(model: str | None, base_url: str | None, api_key_env: str | None, yes: bool, client: Client) -> None:
    """Set up a model, and then a machine, a channel and an MCP client, asking for each.

    With --model, only the model is set up and nothing is asked. The model is asked a short question first; if it does
    not answer, nothing is written. Comments and other settings in farhand.toml stay. A running gateway uses the new
    model at once.

    \b
    Examples:
      farhand setup
      farhand setup --model gpt-5-mini --api-key-env OPENAI_API_KEY --yes
      farhand setup --model qwen3 --base-url http://127.0.0.1:11434/v1
    """
    make_home(client.home)
    if model is not None:
        changes = model_changes(model, base_url, api_key_env, None, _load(client))
        show_written(client, changes, test_model(client, changes, os.environ))
        return
    if base_url or api_key_env:
        raise click.UsageError("--base-url and --api-key-env require --model.")
    if yes or wants_json() or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("without a terminal, give at least --model NAME.")
    _ask_model(client)
    _ask_machine(client)
    _ask_channel(client)
    _ask_mcp(client)
    print("\nDone. `farhand up` starts the gateway, `farhand chat` talks to the agent, `farhand doctor` checks it all.")


# -- the model ----------------------------------------------------------------------------------------------


def model_changes(
    model: str, base_url: str | None, api_key_env: str | None, api_key: str | None, settings: config.Config
) -> Changes:
    """Return the settings for a model. Raises click.UsageError for invalid values."""
    model = model.strip()
    if not model or not model.isprintable():
        raise click.UsageError("--model is blank.")
    if api_key_env is not None and not VARIABLE.fullmatch(api_key_env):
        hint = "it takes the name of a variable, not the key itself"
        raise click.UsageError(f"--api-key-env {api_key_env[:8]}…: {hint}.")
    provider, slash, rest = model.partition("/")
    known = {**PROVIDERS, **settings.providers}
    if base_url is not None:
        base_url = _address(base_url)
        by_address = next((name for name, one in PROVIDERS.items() if one.base_url == base_url), CUSTOM)
        name = provider if slash and provider in known else by_address
        model = model if slash and provider == name else f"{name}/{model}"
    else:
        name = provider if slash and rest and provider in known else DEFAULT_PROVIDER
    changes: dict[tuple[str, str], Any] = {("agent", "model"): model}
    if base_url is not None and PROVIDERS.get(name, ProviderSettings()).base_url != base_url:
        changes[f"providers.{name}", "base_url"] = base_url
    if api_key_env is not None and known.get(name, ProviderSettings()).api_key_env != api_key_env:
        changes[f"providers.{name}", "api_key_env"] = api_key_env
    if api_key is not None:
        changes[f"providers.{name}", "api_key"] = api_key
    return changes


def _address(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"--base-url {url!r} is not an address; write it as http://127.0.0.1:11434/v1.")
    return parts.geturl().rstrip("/")


def test_model(client: Client, changes: Changes, environ: Mapping[str, str]) -> ProbeResult:
    """Ask the model of changed settings a short question. Raises ClientError if it does not answer."""
    import tomllib  # noqa: PLC0415

    made = msgspec.convert(tomllib.loads(changed_text(client.home, changes)), config.Config)
    name = made.agent.model
    # The variable would override the file, and another model would be tested than the one that is written.
    environ = {key: value for key, value in environ.items() if key != "FARHAND_MODEL"}
    variable = next((value for (_, key), value in changes.items() if key == "api_key_env"), None)
    if variable and not environ.get(variable):
        raise ClientError(
            "failed", f"the variable {variable} is not set here, so the model cannot be tested; set it first"
        )
    if not wants_json():
        remark(f"asking {name} …")
    result = asyncio.run(ask_once(made, environ))
    if not result.ok:
        raise ClientError("failed", f"the model {name!r} does not answer: {result.error}; nothing was written")
    return result


def show_written(client: Client, changes: Changes, result: ProbeResult) -> None:
    """Write tested settings and say what holds from now on."""
    path = write_settings(client.home, changed_text(client.home, changes))
    overridden = os.environ.get("FARHAND_MODEL", "")
    variable = next((value for (_, key), value in changes.items() if key == "api_key_env"), None)
    if wants_json():
        show_json({"model": changes["agent", "model"], "file": str(path), "seconds": result.seconds})
        return
    print(f"{changes['agent', 'model']} answered within {result.seconds:g} s; written to {path}")
    if overridden:
        remark(f"FARHAND_MODEL={overridden} is set and overrides this; unset it")
    if variable:
        remark(f"the gateway needs the variable {variable}, too, wherever it is started")
    try:
        checked = client.post("/v1/models/check", {})
    except ClientError:
        return  # none is running
    if checked.value["ok"]:
        remark("the running gateway uses it from now on")
    else:
        remark(f"the running gateway cannot use it yet: {checked.value['error']}")


def _load(client: Client) -> config.Config:
    try:
        return config.load(client.home)
    except config.SettingsError as error:
        raise ClientError("failed", f"{error}; correct it first") from None


def _ask_model(client: Client) -> None:
    print("1. A model for the agent. Everything but the agent works without one.")
    for number, name in enumerate(PROVIDERS, 1):
        print(f"   {number}) {name.ljust(11)} {PROVIDERS[name].base_url}")
    print(f"   {len(PROVIDERS) + 1}) {OTHER.ljust(11)} an OpenAI-compatible server")
    while True:
        chosen = click.prompt("   Number, or Enter to skip", default="", show_default=False).strip()
        if not chosen:
            return
        names = [*PROVIDERS, OTHER]
        name = names[int(chosen) - 1] if chosen.isdecimal() and 0 < int(chosen) <= len(names) else chosen
        if name not in names:
            print(f"   {chosen!r} is not one of these.")
            continue
        if _ask_details(client, name):
            return


def _ask_details(client: Client, name: str) -> bool:
    """Ask for a model of a provider and its key, test and write them; return whether that worked."""
    base_url = click.prompt("   Address, up to /v1") if name == OTHER else None
    model = click.prompt("   Model", default=SUGGESTED.get(name))
    known = PROVIDERS.get(name, ProviderSettings())
    variable, key = None, None
    if not known.api_key:
        if known.api_key_env and os.environ.get(known.api_key_env):
            print(f"   using the key in {known.api_key_env}")
            variable = known.api_key_env
        else:
            given = click.prompt("   Key, or the name of its variable", default="", hide_input=True, show_default=False)
            if VARIABLE.fullmatch(given) and given in os.environ:
                variable = given
            else:
                key = given or None
    try:
        full = model if name == OTHER or model.startswith(f"{name}/") else f"{name}/{model}"
        changes = model_changes(full, base_url, variable, key, _load(client))
        show_written(client, changes, test_model(client, changes, os.environ))
    except (ClientError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        print(f"   {plain_lines(message)}")
        return False
    return True


# -- machine, channel, MCP client ---------------------------------------------------------------------------


def _ask_machine(client: Client) -> None:
    print("\n2. Machines. `farhand up` lends this one; others join with one line.")
    try:
        client.get("/v1/health")
    except ClientError:
        print("   No gateway is running; later, `farhand node pair` prints the line.")
        return
    if click.confirm("   Add another machine now?", default=False):
        _run(pair.pair, client)


def _ask_channel(client: Client) -> None:
    print("\n3. A chat channel. Telegram needs a bot's token from @BotFather; others are in the documentation.")
    token = click.prompt("   Token, or Enter to skip", default="", hide_input=True, show_default=False).strip()
    if not token:
        return
    try:
        name = telegram_name(token)
        changes = {("channels.telegram", "kind"): "telegram", ("channels.telegram", "token"): token}
        write_settings(client.home, changed_text(client.home, changes))
    except ClientError as error:
        print(f"   {plain_lines(str(error))}; nothing was written")
        return
    print(f"   @{name} answers; written. It applies after a restart of the gateway, if one is running.")


def telegram_name(token: str) -> str:
    """Return the name of the bot that a token belongs to. Raises ClientError."""
    import httpx2  # noqa: PLC0415

    try:
        answer = httpx2.get(f"https://api.telegram.org/bot{token}/getMe", timeout=20).json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ClientError("failed", f"Telegram cannot be reached: {type(error).__name__}") from None
    if not isinstance(answer, dict) or answer.get("ok") is not True:
        raise ClientError("failed", "Telegram rejects the token")
    return str(answer["result"]["username"])


def _ask_mcp(client: Client) -> None:
    known = ", ".join(mcp_install.CLIENTS)
    print(f"\n4. An MCP client that uses your machines: {known}.")
    chosen = click.prompt("   Name, or Enter to skip", default="", show_default=False).strip()
    if chosen:
        _run(mcp_install.install, client, chosen)


def _run(command: click.Command, client: Client, *arguments: str) -> None:
    """Run another command; its failure does not end the setup."""
    try:
        with command.make_context(command.name, ["--home", str(client.home), *arguments]) as context:
            command.invoke(context)
    except (ClientError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"   {plain_lines(message)}")
