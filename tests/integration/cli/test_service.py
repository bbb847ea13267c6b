"""`farhand service`, `upgrade` and `uninstall`: what systemd and launchd are given, and what they are asked to do."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farhand.cli.setup.units import ServiceSpec, farhand_command, launchd_plist, systemd_unit
from farhand.cli.setup.upgrade import find_installation
from tests.integration.cli.conftest import Command

# Stands for systemctl, loginctl and journalctl: writes down how it was called, and knows what is active.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
case "$*" in
    *is-active*) [ -e "{state}" ] && echo active || echo inactive ;;
    *is-enabled*) echo enabled ;;
    *restart*|*" start "*) touch "{state}" ;;
    *stop*|*disable*) rm -f "{state}" ;;
    *--lines*) echo "one line" ;;
esac
[ ! -e "{broken}" ] || {{ echo "no bus" >&2; exit 1; }}
"""


class Account:
    """A user with a home of their own and a service manager that obeys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log, self.state, self.broken = folder / "log", folder / "active", folder / "broken"
        programs = folder / "bin"
        programs.mkdir()
        for name in ("systemctl", "loginctl", "journalctl"):
            (programs / name).write_text(PROGRAM.format(log=self.log, state=self.state, broken=self.broken))
            (programs / name).chmod(0o755)
        self.command = Command(folder / "fh", HOME=str(folder), PATH=f"{programs}:{os.environ['PATH']}")
        self.command.env.pop("XDG_CONFIG_HOME", None)

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def as_user(command: Command, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user other than root, if this is root: root has services of the system."""
    words = [
        sys.executable,
        "-c",
        f"import os; os.geteuid = lambda: 1000\nfrom farhand.cli.main import main\nmain({list(arguments)!r})",
    ]
    return subprocess.run(words, env=command.env, capture_output=True, text=True, timeout=60, check=False)


def test_a_user_installs_starts_stops_and_removes_the_service(tmp_path: Path) -> None:
    account = Account(tmp_path)
    done = as_user(account.command, "service", "install")
    unit = tmp_path / ".config/systemd/user/farhand.service"
    assert done.returncode == 0 and str(unit) in done.stdout, done
    assert account.asked == [
        "systemctl --user daemon-reload",
        "systemctl --user enable farhand",
        "systemctl --user restart farhand",
        "loginctl enable-linger",
    ]
    assert f'"--home" "{tmp_path / "fh"}"' in unit.read_text() and "WantedBy=default.target" in unit.read_text()
    status = as_user(account.command, "service", "status", "--json")
    assert json.loads(status.stdout) == {"installed": True, "active": True, "at_boot": True, "file": str(unit)}
    assert as_user(account.command, "service", "logs").stdout == "one line\n"
    assert as_user(account.command, "service", "stop").returncode == 0
    assert as_user(account.command, "service", "status").returncode == 1
    assert as_user(account.command, "service", "start").returncode == 0
    assert as_user(account.command, "service", "uninstall").returncode == 0
    assert not unit.exists()
    missing = as_user(account.command, "service", "start")
    assert missing.returncode == 1 and "service install" in missing.stderr


def test_a_manager_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    account = Account(tmp_path)
    account.broken.touch()
    done = as_user(account.command, "service", "install")
    assert done.returncode == 1 and "no bus" in done.stderr
    assert not (tmp_path / ".config/systemd/user/farhand.service").exists()


def test_a_node_is_a_service_once_it_has_joined(tmp_path: Path) -> None:
    account = Account(tmp_path)
    done = as_user(account.command, "service", "install", "--node")
    assert done.returncode == 1 and "farhand join" in done.stderr
    (tmp_path / "fh").mkdir(mode=0o700)
    (tmp_path / "fh" / "node-token.json").write_text("{}")
    assert as_user(account.command, "service", "install", "--node", "--no-start").returncode == 0
    text = (tmp_path / ".config/systemd/user/farhand-node.service").read_text()
    assert '"-m" "farhand" "node"' in text and "KillMode=process" in text
    assert not any("restart" in line for line in account.asked)


def spec(folder: Path) -> ServiceSpec:
    return ServiceSpec("farhand", "Farhand", farhand_command(sys.executable, ["up"]), folder, folder, system=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_also_with_odd_paths(tmp_path: Path) -> None:
    odd = tmp_path / 'a b $HOME 100% "q" ü'
    odd.mkdir()
    unit = tmp_path / "farhand.service"
    unit.write_text(systemd_unit(spec(odd)))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "farhand.service" not in done.stderr, done


def test_launchd_gets_a_property_list_that_runs_the_command(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "environment").write_text("OFFICE_KEY='a b'\n")
    made = ServiceSpec("farhand-node", "x", ("/usr/bin/env",), home, tmp_path, system=False)
    known = plistlib.loads(launchd_plist(made))
    assert known["Label"] == "org.farhand.farhand-node" and known["KeepAlive"] and known["RunAtLoad"]
    ran = subprocess.run(known["ProgramArguments"], capture_output=True, text=True, timeout=60, check=True, env={})
    assert "OFFICE_KEY=a b" in ran.stdout


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("/home/me/.local/share/pipx/venvs/farhand", "pipx"),
        ("/home/me/.local/pipx/venvs/farhand", "pipx"),
        ("/home/me/.local/share/uv/tools/farhand", "uv"),
    ],
)
def test_the_program_that_installed_it_upgrades_it(prefix: str, kind: str) -> None:
    found = find_installation(Path(prefix))
    assert found.kind == kind and found.upgrade is not None and found.upgrade[0] == kind


def test_uninstalling_shows_a_plan_and_needs_a_yes(tmp_path: Path) -> None:
    account = Account(tmp_path)
    assert as_user(account.command, "service", "install").returncode == 0
    home = tmp_path / "fh"
    plan = json.loads(as_user(account.command, "uninstall", "--purge", "--dry-run", "--json").stdout)
    assert plan["delete"] == [str(home)] and plan["services"]
    refused = as_user(account.command, "uninstall", "--purge")
    assert refused.returncode == 2 and "--yes" in refused.stderr and home.exists()
    done = as_user(account.command, "uninstall", "--purge", "--yes")
    assert done.returncode == 0, done
    assert not home.exists() and not (tmp_path / ".config/systemd/user/farhand.service").exists()
