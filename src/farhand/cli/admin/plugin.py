"""`plugin`: start a plug-in of your own, and run it while you write it."""

from __future__ import annotations

import keyword
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from farhand.cli.client import Client, ClientError
from farhand.cli.commands import command_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import paint, remark, show_json

LOOK_SECONDS: Final = 0.3
STOP_SECONDS: Final = 5.0
DEV_TOKEN_SECONDS: Final = 24 * 3600

PROGRAM: Final = '''"""The plug-in {name}: tools of this machine for a Farhand gateway."""

from typing import Annotated

from farhand.sdk import InvalidArgs, ToolContext, ToolRegistry

registry = ToolRegistry("{name}")


@registry.tool(read_only=True)
async def greet(ctx: ToolContext, who: Annotated[str, "The name of a person."], times: int = 1) -> dict:
    """Greet a person.

    Args:
        times: How often; at most 10.
    """
    if not 1 <= times <= 10:
        raise InvalidArgs("times must be between 1 and 10")
    ctx.log("greeting %s", who)
    greetings = []
    for number in range(times):
        greetings.append(f"Hello, {{who}}!")
        ctx.progress(number + 1, times)
    return {{"greetings": greetings}}


if __name__ == "__main__":
    registry.run()
'''

TEST: Final = '''"""Run with `python -m pytest`."""

import pytest
from farhand.sdk import InvalidArgs
from farhand.sdk.testing import call

from {module} import registry


def test_greet():
    assert call(registry, "{name}.greet", {{"who": "Ada"}}) == {{"greetings": ["Hello, Ada!"]}}


def test_greet_has_a_limit():
    with pytest.raises(InvalidArgs):
        call(registry, "{name}.greet", {{"who": "Ada", "times": 11}})
'''


@command_group
def plugin() -> None:
    """Write a plug-in: tools of your own in Python.

    \b
    Examples:
      farhand plugin new notes
      farhand plugin dev notes/notes.py
    """


@plugin.command("new")
@click.argument("name")
@click.option("--dir", "folder", type=click.Path(file_okay=False, path_type=Path), help="Folder.  [default: NAME]")
def new(name: str, folder: Path | None, client: Client) -> None:  # noqa: ARG001
    """Create a plug-in with one tool and a test.

    \b
    Example:
      farhand plugin new notes
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,40}", name) or keyword.iskeyword(module):
        raise click.UsageError(f"{name!r} cannot be the name: use lower-case letters, digits and -, such as notes.")
    folder = Path(name) if folder is None else folder
    files = {
        folder / f"{module}.py": PROGRAM.format(name=name),
        folder / f"test_{module}.py": TEST.format(name=name, module=module),
    }
    taken = next((path for path in files if path.exists()), None)
    if taken is not None:
        raise ClientError("exists", f"{taken} already exists; choose another name or --dir")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text)
    program = next(iter(files))
    if wants_json():
        show_json({"created": [str(path) for path in files], "command": f"farhand plugin dev {program}"})
        return
    for path in files:
        print(f"created {path}")
    print(f"\nStart it, and edit it while it runs:\n  farhand plugin dev {program}")
    print(f"Then call it:\n  farhand call {name}.greet who=Ada")


@plugin.command("dev")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--id", "node_id", metavar="ID", help="Id of the node.  [default: the file's name and -dev]")
def dev(file: Path, node_id: str | None, client: Client) -> int:
    """Run a plug-in, and restart it whenever a Python file beside it is saved.

    It gets a token of its own, which is revoked when you stop it with Ctrl-C. The gateway must be running.

    \b
    Example:
      farhand plugin dev notes/notes.py
    """
    chosen = node_id or f"{file.stem.replace('_', '-')}-dev"
    made = client.post(
        "/v1/tokens", {"node_id": chosen, "label": f"plugin dev {file.name}", "expires_seconds": DEV_TOKEN_SECONDS}
    ).value
    address = client.find()
    environment = {
        **os.environ,
        **({"FARHAND_PINNED_CERT": address.certificate} if address.certificate else {}),
        "SA_NODE_TOKEN": made["token"],
        "SA_NODE_ID": chosen,
        "SA_NODE_NAME": chosen,
        "SA_GATEWAY_WS_URL": address.url,
        "PYTHONUNBUFFERED": "1",
    }
    remark(paint(f"running {file} as node {chosen}; save a file to restart it, Ctrl-C stops it", dim=True))
    try:
        return _run(file, environment)
    finally:
        client.delete("/v1/tokens/{}", made["id"])


def _run(file: Path, environment: Mapping[str, str]) -> int:
    """Restart the program after each change until SIGINT or SIGTERM."""
    stopping = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopping:
        seen = _state(file.parent)
        # A group of its own: Ctrl-C reaches only this program, which then stops the plug-in.
        child = subprocess.Popen([sys.executable, str(file)], env=dict(environment), start_new_session=True)
        try:
            while not stopping and _state(file.parent) == seen:
                if child.poll() is not None:
                    remark(paint(f"{file.name} ended with status {child.returncode}; waiting for a change", dim=True))
                    while not stopping and _state(file.parent) == seen:
                        time.sleep(LOOK_SECONDS)
                    break
                time.sleep(LOOK_SECONDS)
        finally:
            _end(child)
        if not stopping:
            remark(paint(f"{file.name} changed; restarting", dim=True))
    return 0


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of the Python files in a folder."""
    found = {}
    for entry in os.scandir(folder):
        if entry.name.endswith(".py"):
            try:
                status = entry.stat()
            except FileNotFoundError:  # an editor replaces it right now
                continue
            found[entry.name] = (status.st_mtime_ns, status.st_size)
    return found
