"""The files by which systemd and launchd run Farhand, as text."""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from pathlib import Path

import msgspec


class ServiceSpec(msgspec.Struct, frozen=True):
    """What a service runs."""

    # `farhand` or `farhand-node`.
    name: str
    description: str
    command: tuple[str, ...]
    home: Path
    # Where relative paths of a node start.
    folder: Path
    # Whether it runs for the whole system, as root.
    system: bool

    @property
    def variables_file(self) -> Path:
        """Return the file with variables for the service, such as a model's key: `NAME=value`, one per line."""
        return self.home / "environment"

    @property
    def log_file(self) -> Path:
        return self.home / "logs" / f"{self.name}.log"


def systemd_unit(spec: ServiceSpec) -> str:
    """Return the unit. Commands that callers wait for survive a restart of the service."""
    return f"""\
[Unit]
Description={spec.description}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
ExecStart={" ".join(map(_word, spec.command))}
WorkingDirectory={_path(spec.folder)}
Environment={_quoted(f"FARHAND_HOME={spec.home}")}
EnvironmentFile=-{_path(spec.variables_file)}
KillMode=process
Delegate=yes
Restart=always
RestartSec=2
TimeoutStopSec=30

[Install]
WantedBy={"multi-user.target" if spec.system else "default.target"}
"""


def launchd_plist(spec: ServiceSpec) -> bytes:
    """Return the property list. launchd has no file of variables, so a shell reads it."""
    script = 'if [ -f "$0" ]; then set -a; . "$0"; set +a; fi; exec "$@"'
    return plistlib.dumps(
        {
            "Label": launchd_label(spec.name),
            "ProgramArguments": ["/bin/sh", "-c", script, str(spec.variables_file), *spec.command],
            "EnvironmentVariables": {"FARHAND_HOME": str(spec.home)},
            "WorkingDirectory": str(spec.folder),
            "RunAtLoad": True,
            "KeepAlive": True,
            # As with KillMode=process: commands survive a restart of the service.
            "AbandonProcessGroup": True,
            "ProcessType": "Interactive",
            "StandardOutPath": str(spec.log_file),
            "StandardErrorPath": str(spec.log_file),
        }
    )


def launchd_label(name: str) -> str:
    return f"org.farhand.{name}"


def _quoted(text: str) -> str:
    """Quote a value: blanks, and what systemd would replace."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _word(text: str) -> str:
    """Quote a word of a command line, in which systemd also replaces variables."""
    return _quoted(text.replace("$", "$$"))


def _path(path: Path) -> str:
    """Return a path as a setting that takes the rest of the line."""
    return str(path).replace("%", "%%")


def farhand_command(python: str, arguments: Sequence[str]) -> tuple[str, ...]:
    return (python, "-P", "-m", "farhand", *arguments)
