"""`upgrade` and `uninstall`: by the program that installed Farhand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

import click
import msgspec

from farhand import __version__
from farhand.cli.client import ClientError, reason_of
from farhand.cli.json_output import json_option, wants_json
from farhand.cli.output import show
from farhand.cli.setup.service import installed_services
from farhand.machine.home import home_folder
from farhand.packaging.bundle_main import data_folder

PACKAGE: Final = "farhand"


class Installation(msgspec.Struct, frozen=True):
    """How Farhand was installed here, and the commands that change that; None if no program does."""

    kind: str
    upgrade: tuple[str, ...] | None
    remove: tuple[str, ...] | None
    # What to do instead of `upgrade`.
    advice: str = ""
    # Folders that removing it deletes, and the link to its program.
    folders: tuple[Path, ...] = ()


def find_installation(prefix: Path) -> Installation:
    """Return how the environment `prefix` got its Farhand."""
    own = data_folder()
    if prefix.is_relative_to(own):
        advice = "make a new code with `farhand node pair --id THIS_NODE` on the gateway, and paste its line here"
        return Installation("gateway", None, None, advice, (own,))
    if "pipx" in prefix.parts:
        return Installation("pipx", ("pipx", "upgrade", PACKAGE), ("pipx", "uninstall", PACKAGE))
    if prefix.parent.name == "tools" and "uv" in prefix.parts:
        return Installation("uv", ("uv", "tool", "upgrade", PACKAGE), ("uv", "tool", "uninstall", PACKAGE))
    if _is_editable():
        return Installation("checkout", None, None, "run `git pull`, then `make run` or `pip install -e .`")
    if (prefix / "conda-meta").is_dir() or sys.prefix == sys.base_prefix:
        advice = f"run `{sys.executable} -m pip install --upgrade {PACKAGE}` if you installed it that way"
        return Installation("system", None, None, advice)
    pip = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check")
    return Installation("pip", (*pip, "install", "--upgrade", PACKAGE), (*pip, "uninstall", "--yes", PACKAGE))


def _is_editable() -> bool:
    text = metadata.distribution(PACKAGE).read_text("direct_url.json")
    try:
        return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


@click.command()
@click.option("--dry-run", is_flag=True, help="Show the command, and run nothing.")
@json_option(expose_value=False)
def upgrade(dry_run: bool) -> None:
    """Upgrade Farhand with the program that installed it: pipx, uv or pip.

    \b
    Examples:
      farhand upgrade
      farhand upgrade --dry-run
    """
    found = find_installation(Path(sys.prefix))
    if found.upgrade is None:
        raise ClientError(
            "failed", f"farhand {__version__} was not installed by a program that upgrades it; {found.advice}"
        )
    if dry_run:
        show({"version": __version__, "kind": found.kind, "command": list(found.upgrade)}, _show)
        return
    _run(found.upgrade)
    services = installed_services()
    options = [" --node" if one.spec.name.endswith("-node") else "" for one in services]
    show(
        {"kind": found.kind, "upgraded_from": __version__, "restart": [one.spec.name for one in services]},
        hint="\n".join(
            f"restart the service: farhand service stop{one}; farhand service start{one}" for one in options
        ),
    )


@click.command()
@click.option("--home", type=click.Path(file_okay=False), help="State and settings.  [~/.farhand]")
@click.option("--purge", is_flag=True, help="Delete the home, too: settings, keys, history, the agents' files.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@json_option(expose_value=False)
def uninstall(home: str | None, purge: bool, yes: bool, dry_run: bool) -> None:
    """Stop and remove services, and remove Farhand. The home stays unless --purge is given.

    \b
    Examples:
      farhand uninstall --dry-run
      farhand uninstall
      farhand uninstall --purge --yes
    """
    found = find_installation(Path(sys.prefix))
    services = installed_services()
    link = Path.home() / ".local" / "bin" / PACKAGE
    files = [*found.folders, *([link] if found.folders and _leads_into(link, found.folders) else [])]
    files += [home_folder(home)] if purge and home_folder(home).exists() else []
    plan = {
        "services": [str(one.file) for one in services],
        "command": list(found.remove or ()),
        "delete": [str(path) for path in files],
    }
    if not any(plan.values()):
        raise ClientError("failed", f"nothing to remove: this is a {found.kind} installation; delete it yourself")
    if dry_run:
        show(plan, _show)
        return
    if not yes:
        if wants_json() or not sys.stdin.isatty():
            raise click.UsageError("without a terminal, give --yes; --dry-run shows what would be removed.")
        _show(plan)
        click.confirm("Remove all this?", abort=True)
    for one in services:
        one.uninstall()
    for path in files:
        _delete(path)
    if found.remove is not None:
        _run(found.remove)
    show(plan, "removed" if purge else f"removed; the home {home_folder(home)} stays")


def _leads_into(link: Path, folders: tuple[Path, ...]) -> bool:
    return link.is_symlink() and any(link.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ClientError("failed", f"cannot delete {path}: {reason_of(error)}") from None


def _show(plan: Mapping[str, object]) -> None:
    for name, value in plan.items():
        text = " ".join(value) if name == "command" and isinstance(value, list) else value
        for line in text if isinstance(text, list) else [text]:
            if line:
                print(f"{name.ljust(8)}  {line}")


def _run(command: tuple[str, ...]) -> None:
    """Run a program with its output on ours; standard output is kept for the document of --json."""
    try:
        done = subprocess.run(command, check=False, stdout=sys.stderr if wants_json() else None, env=dict(os.environ))
    except OSError as error:
        raise ClientError("failed", f"cannot run {' '.join(command)}: {reason_of(error)}") from None
    if done.returncode:
        raise ClientError("failed", f"{' '.join(command)} failed with status {done.returncode}; see above")
