"""Plug-ins of an installed package: the one in `examples/plugin_package`, and broken ones."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, wait_until

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "plugin_package"
SETTINGS = """
[agent]
model = "parrot/polly"

[objects]
url = "memory://"

[channels.notebook]
path = "{notebook}"
"""


def install(site: Path, package: Path = PACKAGE) -> None:
    """Do what pip does: copy the modules, and write the metadata with the entry points of the project file."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    for module in (package / "src").iterdir():
        shutil.copytree(module, site / module.name, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    install(folder)
    return folder


def test_a_package_adds_a_tool_a_channel_a_model_and_an_object_store(tmp_path: Path, site: Path) -> None:
    home, notebook = tmp_path / "home", tmp_path / "notes"
    home.mkdir()
    (home / "farhand.toml").write_text(SETTINGS.format(notebook=notebook))
    with GatewayProcess(home, env={"PYTHONPATH": str(site)}) as gateway:
        counted = gateway.request("POST", "/v1/tools/invoke", {"tool": "word_count", "args": {"text": "one two"}})
        assert counted.json()["result"] == {"words": 2, "characters": 7}
        assert "word_count" in [tool["name"] for tool in gateway.get("/v1/tools")["tools"]]

        said = {"message": "hello", "wait_seconds": 20}
        answer = gateway.request("POST", "/v1/sessions/main/messages", said).json()
        assert answer["reply"].startswith("polly says:") and "hello" in answer["reply"], answer

        written = gateway.request("PUT", "/v1/workspace/main/plan.md", b"in memory")
        assert written.status == 200, written.body
        assert gateway.request("GET", "/v1/workspace/main/plan.md").body == b"in memory"
        assert not list(home.rglob("plan.md"))

        message = {"channel": "notebook", "to": "me", "text": "remember this"}
        sent = gateway.request("POST", "/v1/tools/invoke", {"tool": "gsv__Message", "args": message}).json()
        assert sent["ok"], sent
        wait_until(notebook.exists, 10, "the message in the notebook")
        assert json.loads(notebook.read_text()) == {"to": "me", "text": "remember this"}
        assert "loaded plug-in 'example' (farhand.tools of farhand-example 1.0): word_count" in gateway.log.read_text()


def test_broken_plug_ins_are_reported_and_left_out(tmp_path: Path, site: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "src" / "torn").mkdir(parents=True)
    (broken / "src" / "torn" / "__init__.py").write_text("raise RuntimeError('torn apart')\n")
    (broken / "pyproject.toml").write_text(
        '[project]\nname = "torn"\nversion = "2"\n'
        '[project.entry-points."farhand.tools"]\ntorn = "torn:tools"\n'
        'same = "farhand_example.tools:tools"\n'
        '[project.entry-points."farhand.channels"]\nrag = "torn:CHANNEL"\ntelegram = "torn:CHANNEL"\n'
        '[project.entry-points."farhand.models"]\nrag = "torn:make"\n'
    )
    install(site, broken)
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text('[agent]\nmodel = "rag/1"\n[channels.rag]\n')
    with GatewayProcess(home, env={"PYTHONPATH": str(site)}) as gateway:
        log = gateway.log.read_text()
        assert "plug-in 'torn' (farhand.tools of torn 2) cannot be loaded: RuntimeError: torn apart" in log
        assert "plug-in 'same' (farhand.tools of torn 2): there is a tool 'word_count' already" in log
        assert "[channels.rag] is skipped: plug-in 'rag' (farhand.channels of torn 2) cannot be loaded" in log
        assert "plug-in 'telegram' (farhand.channels of torn 2) is ignored" in log
        assert "Traceback" not in log
        assert "rag" not in [channel["name"] for channel in gateway.get("/v1/channels")["channels"]]
        answer = gateway.request("POST", "/v1/sessions/main/messages", {"message": "hi", "wait_seconds": 20}).json()
        assert "torn apart" in answer["error"]["message"], answer

        checks = Command(home, PYTHONPATH=str(site))("doctor", "--json").json()["checks"]
        plug_ins = next(check for check in checks if check["name"] == "plug-ins")
        assert plug_ins["status"] == "warning" and "torn apart" in plug_ins["message"], plug_ins
