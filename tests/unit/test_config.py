"""Settings: what a file may say, and what is read again while the gateway runs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import get_args, get_origin

import msgspec
import pytest

from farhand.config import FILE, LIVE_KEYS, LIVE_SECTIONS, LOOK_SECONDS, Config, LiveConfig, SettingsError, load
from tests.support.harness import ROOT, wait_until


def write(home: Path, text: str) -> None:
    beside = home / "new"
    beside.write_text(text)
    beside.replace(home / FILE)


def test_a_changed_file_holds_at_once(tmp_path: Path) -> None:
    live = LiveConfig(tmp_path, load(tmp_path, {}), {})
    assert live.now.tools.disabled == []
    write(tmp_path, '[tools]\ndisabled = ["shell"]')
    wait_until(lambda: live.now.tools.disabled == ["shell"])
    (tmp_path / FILE).write_text("[tools]\ndisabled = []")
    wait_until(lambda: live.now.tools.disabled == [])
    write(tmp_path, '[tools]\nroots = ["/srv"]')
    wait_until(lambda: live.now.tools.roots == ["/srv"])
    os.unlink(tmp_path / FILE)
    wait_until(lambda: live.now.tools.roots == [])


def test_settings_that_did_not_change_are_the_same_object(tmp_path: Path) -> None:
    write(tmp_path, '[tools]\nroots = ["/srv"]')
    live = LiveConfig(tmp_path, load(tmp_path, {}), {})
    assert live.now is live.now


@pytest.mark.parametrize(
    "text", ["[tools", "[tools]\nroot = []", '[tools]\nroots = ["relative"]', "[tools]\nroots = 3"]
)
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, '[tools]\ndisabled = ["shell"]')
    live = LiveConfig(tmp_path, load(tmp_path, {}), {})
    write(tmp_path, text)
    time.sleep(2 * LOOK_SECONDS)
    assert live.now.tools.disabled == ["shell"]
    with pytest.raises(SettingsError):
        load(tmp_path, {})
    write(tmp_path, "[tools]\ndisabled = []")
    wait_until(lambda: live.now.tools.disabled == [])


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    write(tmp_path, '[tools]\nroots = ["/srv"]\ndisabled = ["shell"]')
    config = load(tmp_path, {"FARHAND_TOOLS_ROOTS": "/a, /b", "FARHAND_TOOLS_DISABLED": ""})
    assert (config.tools.roots, config.tools.disabled) == (["/a", "/b"], [])


def test_a_section_that_is_not_a_table_is_named_whatever_the_environment_says(tmp_path: Path) -> None:
    write(tmp_path, "gateway = 5")
    with pytest.raises(SettingsError, match="gateway"):
        load(tmp_path, {"FARHAND_GATEWAY_PORT": "0"})


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_an_invalid_port_is_not_taken_for_another(tmp_path: Path, port: str) -> None:
    with pytest.raises(SettingsError, match=port):
        load(tmp_path, {"FARHAND_GATEWAY_PORT": port})


def test_the_page_of_settings_has_every_key_and_says_which_hold_without_a_restart() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    names = {"agents": "NAME", "providers": "NAME", "models": "NAME", "channels": "NAME", "mcp": "NAME", "hooks": "ID"}
    for section in msgspec.structs.fields(Config):
        assert f"[{section.name}{'.' + names[section.name] if section.name in names else ''}]" in page, section.name
        named = f"{section.name}.{names[section.name]}" if section.name in names else section.name
        kind = get_args(section.type)[-1] if get_origin(section.type) in (dict, list) else section.type
        keys = [field.name for field in msgspec.structs.fields(kind)] if section.name != "channels" else []
        missing = [
            key for key in keys if f"`{named}.{key}`" not in page and not (named == "gateway" and f"`{key}`" in page)
        ]
        assert not missing, named
    live = page.partition(" apply without a restart")[0].rpartition("\n\n")[2]
    assert {*(f"`[{name}]`" for name in LIVE_SECTIONS), *(f"`{name}`" for name in LIVE_KEYS)} == set(
        re.findall(r"`[^`]+`", live)
    )
