"""`service`: run the gateway or the node under systemd or launchd, so that it starts with the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from farhand.cli.client import ClientError, reason_of
from farhand.cli.json_output import group_json_option, json_option, wants_json
from farhand.cli.output import remark, show, show_fields, show_json
from farhand.cli.run.node import NODE_TOKEN_FILE
from farhand.cli.setup.units import ServiceSpec, farhand_command, launchd_label, launchd_plist, systemd_unit
from farhand.machine.home import home_folder, make_home

LINES: Final = 100
SECONDS: Final = 60


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_option(expose_value=False),
        click.option("--home", type=click.Path(file_okay=False), help="State and settings.  [~/.farhand]"),
        click.option("--node", "as_node", is_flag=True, help="The node that joined a gateway, not a gateway."),
    ):
        command = option(command)
    return command


@click.group()
@group_json_option
def service() -> None:
    """Run Farhand as a service that starts with the machine: a gateway, or with --node the node.

    As root, it is a service of the system; otherwise one of this user.
    """


@service.command()
@_options
@click.option("--print", "print_only", is_flag=True, help="Print the file, and change nothing.")
@click.option("--no-start", is_flag=True, help="Install it, and do not start it now.")
def install(as_node: bool, home: str | None, print_only: bool, no_start: bool) -> None:
    """Install the service and start it.

    The gateway takes its address from farhand.toml. Variables for the service, such as a model's key, are read from the
    file `environment` in the home: NAME=value, one per line.

    \b
    Examples:
      farhand service install
      farhand service install --node
      farhand service install --print
    """
    manager = _manager(home, as_node=as_node)
    if print_only:
        print(manager.text, end="")
        return
    if as_node and not (manager.spec.home / NODE_TOKEN_FILE).exists():
        raise ClientError("failed", "this machine has joined no gateway; run `farhand join CODE` first")
    make_home(manager.spec.home)
    manager.install(start=not no_start)
    _show(manager, f"installed {manager.file}" + ("" if no_start else "; it runs now, and after each restart"))


@service.command()
@_options
def uninstall(as_node: bool, home: str | None) -> None:
    """Stop the service and remove it. The home stays."""
    manager = _manager(home, as_node=as_node)
    if not manager.file.exists():
        raise ClientError("not_found", f"the service is not installed: there is no {manager.file}")
    manager.uninstall()
    _show(manager, f"removed {manager.file}")


@service.command()
@_options
def start(as_node: bool, home: str | None) -> None:
    """Start the service."""
    manager = _installed(home, as_node=as_node)
    manager.start()
    _show(manager, f"started {manager.spec.name}")


@service.command()
@_options
def stop(as_node: bool, home: str | None) -> None:
    """Stop the service until the next start of the machine."""
    manager = _installed(home, as_node=as_node)
    manager.stop()
    _show(manager, f"stopped {manager.spec.name}")


@service.command()
@_options
def status(as_node: bool, home: str | None) -> int:
    """Show whether the service runs. The exit status is 0 only if it does."""
    manager = _manager(home, as_node=as_node)
    known = manager.status()
    words = {name.replace("_", " "): {True: "yes", False: "no"}.get(value, value) for name, value in known.items()}
    show(known, lambda _: show_fields({"service": manager.spec.name, **words}))
    return 0 if known["active"] else 1


@service.command()
@_options
@click.option("--lines", type=click.IntRange(1, 100_000), default=LINES, show_default=True, help="How many.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more.")
def logs(as_node: bool, home: str | None, lines: int, follow: bool) -> int:
    """Show the newest lines that the service printed."""
    manager = _installed(home, as_node=as_node)
    command = manager.log_command(lines, follow=follow and not wants_json())
    if wants_json():
        show_json({"lines": _run(command).stdout.splitlines()})
        return 0
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise ClientError("failed", f"cannot run {command[0]}: {reason_of(error)}") from None


def _show(manager: Manager, text: str) -> None:
    if wants_json():
        show_json(manager.status())
    else:
        print(text)
        for one in manager.remarks:
            remark(one)


def _manager(home: str | None, *, as_node: bool) -> Manager:
    folder = home_folder(home)
    arguments = ("node" if as_node else "up", "--home", str(folder))
    spec = ServiceSpec(
        name="farhand-node" if as_node else "farhand",
        description="Farhand node: lends this machine" if as_node else "Farhand gateway, with this machine as a node",
        command=farhand_command(sys.executable, arguments),
        home=folder,
        folder=Path.home(),
        system=os.geteuid() == 0,
    )
    return Launchd(spec) if sys.platform == "darwin" else Systemd(spec)


def _installed(home: str | None, *, as_node: bool) -> Manager:
    manager = _manager(home, as_node=as_node)
    if not manager.file.exists():
        option = " --node" if as_node else ""
        raise ClientError("not_found", f"the service is not installed; `farhand service install{option}` does that")
    return manager


def installed_services() -> list[Manager]:
    """Return the services that are installed for this user."""
    known = [_manager(None, as_node=as_node) for as_node in (False, True)]
    return [one for one in known if one.file.exists()]


def _run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program of the system. Raises ClientError with what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClientError("failed", f"cannot run {' '.join(command)}: {reason_of(error)}") from None
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClientError("failed", f"{' '.join(command)} failed: {said or done.returncode}")
    return done


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        raise ClientError("failed", f"cannot write {file}: {reason_of(error)}") from None


class Systemd:
    """One service of systemd."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.remarks: list[str] = []
        settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        folder = Path("/etc/systemd/system") if spec.system else settings / "systemd" / "user"
        self.file = folder / f"{spec.name}.service"
        self.text = systemd_unit(spec)

    def install(self, *, start: bool) -> None:
        if shutil.which("systemctl") is None:
            raise ClientError("failed", "this system has no systemd; `farhand service install --print` shows the unit")
        before = self.file.read_bytes() if self.file.exists() else None
        _write(self.file, self.text.encode())
        try:
            self._control("daemon-reload")
            self._control("enable", self.spec.name)
        except ClientError:
            if before is None:
                self.file.unlink(missing_ok=True)
            else:
                _write(self.file, before)
            raise
        if start:
            self._control("restart", self.spec.name)
        if not self.spec.system:
            self._linger()

    def _linger(self) -> None:
        """Let services of this user start with the machine, not with the first login."""
        try:
            _run(["loginctl", "enable-linger"])
        except ClientError as error:
            self.remarks.append(f"it starts at your first login only: {error}; `sudo loginctl enable-linger $USER`")

    def uninstall(self) -> None:
        self._control("disable", "--now", self.spec.name, check=False)
        self.file.unlink(missing_ok=True)
        self._control("daemon-reload", check=False)

    def start(self) -> None:
        self._control("start", self.spec.name)

    def stop(self) -> None:
        self._control("stop", self.spec.name)

    def status(self) -> dict[str, Any]:
        installed = self.file.exists()
        active = installed and self._control("is-active", self.spec.name, check=False).stdout.strip() == "active"
        enabled = installed and self._control("is-enabled", self.spec.name, check=False).stdout.strip() == "enabled"
        return {"installed": installed, "active": active, "at_boot": enabled, "file": str(self.file)}

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        user = [] if self.spec.system else ["--user"]
        more = ["--follow"] if follow else ["--no-pager"]
        return ["journalctl", *user, "--unit", self.spec.name, "--lines", str(lines), *more]

    def _control(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run(["systemctl", *([] if self.spec.system else ["--user"]), *arguments], check=check)


class Launchd:
    """One service of launchd."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.remarks: list[str] = []
        self._label = launchd_label(spec.name)
        top = Path("/Library/LaunchDaemons") if spec.system else Path.home() / "Library" / "LaunchAgents"
        self.file = top / f"{self._label}.plist"
        self.text = launchd_plist(spec).decode()
        self._domain = "system" if spec.system else f"gui/{os.getuid()}"

    def install(self, *, start: bool) -> None:
        self.spec.log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(self.file, self.text.encode())
        _run(["launchctl", "bootout", f"{self._domain}/{self._label}"], check=False)
        _run(["launchctl", "enable", f"{self._domain}/{self._label}"])
        if start:
            self.start()
        if not self.spec.system:
            self.remarks.append(
                "it starts when you log in; as root, `farhand service install` starts it with the machine"
            )

    def uninstall(self) -> None:
        _run(["launchctl", "bootout", f"{self._domain}/{self._label}"], check=False)
        self.file.unlink(missing_ok=True)

    def start(self) -> None:
        _run(["launchctl", "bootstrap", self._domain, str(self.file)], check=False)
        _run(["launchctl", "kickstart", f"{self._domain}/{self._label}"])

    def stop(self) -> None:
        _run(["launchctl", "bootout", f"{self._domain}/{self._label}"])

    def status(self) -> dict[str, Any]:
        shown = _run(["launchctl", "print", f"{self._domain}/{self._label}"], check=False)
        active = shown.returncode == 0 and "state = running" in shown.stdout
        return {
            "installed": self.file.exists(),
            "active": active,
            "at_boot": self.file.exists(),
            "file": str(self.file),
        }

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self.spec.log_file)]


Manager = Systemd | Launchd
