"""`farhand doctor`: finds what is wrong, and fails for it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from farhand import config
from farhand.cli.admin.doctor import FREE_FAIL, FREE_WARN, _exposure, _version
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, PluginProcess


def verdicts(command: Command) -> dict[str, Any]:
    document = command("doctor", "--json").json()
    return {check["name"]: check for check in document["checks"]} | {"ok": document["ok"]}


def test_all_is_well(command: Command, hello: PluginProcess) -> None:
    done = command("doctor")
    assert done.status == 0 and "✗" not in done.out
    found = verdicts(command)
    assert found.pop("ok") is True
    assert set(found) == {
        "Python", "SQLite", "uvloop", "httptools", "home", "owner token", "settings", "sandbox", "store",
        "journal", "history", "disk", "node tokens", "gateway", "version", "nodes", "strangers", "exposure",
        "model", "restart",
    }  # fmt: skip
    assert "hello" in found["nodes"]["message"]


def test_without_colours_and_without_unicode_it_can_still_be_read(command: Command, hello: PluginProcess) -> None:
    out = command.with_env(PYTHONIOENCODING="ascii")("doctor").out
    assert out.isascii() and "ok      Python" in out


def test_nothing_there_yet(tmp_path: Path) -> None:
    command = Command(tmp_path / "home")
    done = command("doctor")
    assert done.status == 1 and "farhand up" in done.out
    found = verdicts(command)
    assert [name for name in ("home", "owner token", "gateway") if found[name]["status"] == "failed"] == [
        "home", "owner token", "gateway",
    ]  # fmt: skip
    assert not (tmp_path / "home").exists(), "looking changes nothing"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / "token").touch(0o600)
    (folder / "token").write_text("fho_x\n")
    return folder


def test_a_home_and_a_token_others_can_read(home: Path) -> None:
    home.chmod(0o755)
    (home / "token").chmod(0o644)
    found = verdicts(Command(home))
    assert found["home"]["status"] == "failed" and "chmod 700" in found["home"]["message"]
    assert found["owner token"]["status"] == "failed" and "chmod 600" in found["owner token"]["message"]


def test_a_blank_token(home: Path) -> None:
    (home / "token").write_text("\n")
    assert "blank" in verdicts(Command(home))["owner token"]["message"]


def test_settings_that_do_not_parse(home: Path) -> None:
    (home / "farhand.toml").write_text("[gateway]\nprot = 1\n")
    check = verdicts(Command(home))["settings"]
    assert check["status"] == "failed" and "did you mean 'port'" in check["message"]


@pytest.mark.parametrize("name", ["SA_NODE_TOKEN", "SA_NODE_TOKENS"])
def test_a_blank_node_token(home: Path, name: str) -> None:
    check = verdicts(Command(home, **{name: " "}))["node tokens"]
    assert check["status"] == "failed" and name in check["message"]


@pytest.mark.parametrize(("name", "value"), [("SA_NODE_CAPS", "pi=p.q"), ("SA_NODE_TOKENS", "hidden-token-of-a-node")])
def test_an_environment_the_gateway_does_not_start_with(home: Path, name: str, value: str) -> None:
    check = verdicts(Command(home, **{name: value}))["node tokens"]
    assert check["status"] == "failed" and f"{name}: entry 1" in check["message"]
    assert "hidden" not in check["message"]


def test_something_else_answers_in_its_place(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        server.settimeout(10)
        process = Command(home).start("doctor", "--url", url)
        peer, _ = server.accept()
        with peer:
            peer.recv(65536)
            peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "does not speak HTTP" in out


def test_listening_beyond_this_machine_without_tls_fails(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", "--host", "0.0.0.0", env={"FARHAND_GATEWAY_TLS": "off"}) as gateway:
        check = verdicts(Command(gateway.home))["exposure"]
    assert check["status"] == "failed" and "0.0.0.0" in check["message"]


def test_with_tls_it_is_fine() -> None:
    settings = config.Config(config.GatewaySection(host="0.0.0.0", tls_cert="a", tls_key="b"))
    assert _exposure(settings, None, None).status == "ok"
    assert _exposure(settings, "https://127.0.0.1:3210", ["0.0.0.0"]).status == "ok"
    assert _exposure(settings, "http://127.0.0.1:3210", ["0.0.0.0"]).status == "failed"


def test_another_version_fails() -> None:
    assert _version("0.0.0").status == "failed"
    assert FREE_FAIL < FREE_WARN


def test_a_sandbox_that_is_not_available_is_reported(tmp_path: Path) -> None:
    command = Command(tmp_path / "home")
    (tmp_path / "home").mkdir()
    settings = tmp_path / "home" / "farhand.toml"
    settings.write_text('[sandbox]\nenabled = true\nlevel = "bubblewrap"\n')
    without = command.with_env(PATH=str(tmp_path))
    assert verdicts(without)["sandbox"]["status"] == "failed"
    assert "'bwrap' is missing" in verdicts(without)["sandbox"]["message"]
    settings.write_text('[sandbox]\nenabled = true\nuser = "no such person"\n')
    assert verdicts(command)["sandbox"]["status"] == "failed"


def test_a_gateway_that_requires_no_token_fails(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", "--open") as gateway:
        check = verdicts(Command(gateway.home))["strangers"]
    assert check["status"] == "failed" and "--open" in check["message"]


def test_a_node_token_that_can_be_guessed_is_reported(home: Path) -> None:
    assert verdicts(Command(home, SA_NODE_TOKEN="short"))["node tokens"]["status"] == "warning"
    assert verdicts(Command(home, SA_NODE_TOKENS="a:short,b:" + "x" * 32))["node tokens"]["status"] == "warning"
    assert verdicts(Command(home, SA_NODE_TOKEN="x" * 32))["node tokens"]["status"] == "ok"


OLD_SQLITE = "import apsw\napsw.sqlite_lib_version = lambda: '3.40.1'\n"


def test_every_unsafe_exposure_is_reported(tmp_path: Path) -> None:
    """Each alone, beside a gateway that is fine otherwise: the status is 1, and one check has failed."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sitecustomize.py").write_text(OLD_SQLITE)
    tried = held = 0

    def reported(check: str, gateway: GatewayProcess, **env: str) -> None:
        nonlocal tried, held
        done = Command(gateway.home, **env)("doctor", "--json")
        failed = [one["name"] for one in done.json()["checks"] if one["status"] == "failed"]
        tried += 1
        held += done.status == 1 and failed == [check]
        assert (done.status, failed) == (1, [check]), done

    with GatewayProcess(tmp_path / "home") as gateway:
        home = gateway.home
        assert Command(home)("doctor", "--json").status == 0
        reported("SQLite", gateway, PYTHONPATH=str(tmp_path / "old"))
        reported("node tokens", gateway, SA_NODE_TOKEN=" ")
        home.chmod(0o755)
        reported("home", gateway)
        home.chmod(0o700)
        (home / "token").chmod(0o644)
        reported("owner token", gateway)
        (home / "token").chmod(0o600)
        key = home / "nodes" / "n" / "key.json"
        key.parent.mkdir(parents=True)
        key.write_text("{}")
        key.chmod(0o644)
        reported("key.json", gateway)
    with GatewayProcess(tmp_path / "wide", "--host", "0.0.0.0", env={"FARHAND_GATEWAY_TLS": "off"}) as gateway:
        reported("exposure", gateway)
    with GatewayProcess(tmp_path / "open", "--open") as gateway:
        reported("strangers", gateway)
    print(f"unsafe exposures: {tried} tried, {held} held")


def test_open_beyond_this_machine_does_not_even_start(tmp_path: Path) -> None:
    done = Command(tmp_path / "home")("gateway", "--open", "--host", "0.0.0.0", "--port", "0")
    assert done.status == 1 and "loopback" in done.err


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "no address"])
def test_an_invalid_address_is_a_finding(tmp_path: Path, url: str) -> None:
    done = Command(tmp_path)("doctor", "--url", url, "--json")
    (found,) = [check for check in done.json()["checks"] if check["name"] == "gateway"]
    assert done.status == 1 and "is not the address of a gateway" in found["message"]
