"""How the commands find the gateway, and what they say when they do not."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trustme

from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import ROOT, GatewayProcess, free_port


@pytest.mark.parametrize(
    "arguments",
    [
        ["nodes"],
        ["tools"],
        ["calls"],
        ["calls", "show", "x"],
        ["call", "x"],
        ["events"],
        ["token", "list"],
        ["nodes", "forget", "x"],
    ],
)
def test_without_a_gateway_every_command_says_what_to_run(tmp_path: Path, arguments: list[str]) -> None:
    command = Command(tmp_path / "home")
    done = command(*arguments)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1 and "`farhand up`" in done.err
    as_json = command(*arguments, "--json")
    assert as_json.status == 1 and as_json.err == "" and as_json.json()["error"]["code"] == "no_gateway"


def test_files_of_a_crashed_gateway_do_not_count_as_a_running_one(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    gateway.start()
    gateway.kill()
    assert (gateway.home / "gateway.json").exists()
    assert "no gateway is running" in Command(gateway.home)("nodes").err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": "http://x"}', '{"url": "x", "pid": "y"}'])
def test_a_damaged_address_file_counts_as_no_gateway(tmp_path: Path, text: str) -> None:
    (tmp_path / "gateway.json").write_text(text)
    assert "no gateway is running" in Command(tmp_path)("nodes").err


def test_the_home_option_wins_over_the_environment(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    command = Command(tmp_path, FARHAND_URL="http://127.0.0.1:1", FARHAND_TOKEN="wrong")
    assert command("nodes", "--home", str(shared_gateway.home)).status == 0
    assert command("nodes").status == 1


def test_a_url_and_a_token_from_the_environment(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    command = Command(tmp_path, FARHAND_TOKEN=shared_gateway.token)
    assert command("nodes", "--url", shared_gateway.url).status == 0
    assert command("nodes", "--url", shared_gateway.url.removeprefix("http://") + "/").status == 0
    assert command.with_env(FARHAND_URL=shared_gateway.url)("nodes").status == 0


def test_the_token_of_a_home_goes_to_its_own_gateway_only(shared_gateway: GatewayProcess, command: Command) -> None:
    assert command("nodes", "--url", shared_gateway.url).status == 0
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            peer, _ = server.accept()
            with peer:
                heard.append(peer.recv(65536))

        thread = threading.Thread(target=listen)
        thread.start()
        command("nodes", "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join(60)
    assert b"GET /v1/nodes" in heard[0] and b"uthorization" not in heard[0]


@pytest.mark.parametrize(
    ("token", "says"),
    [("", "requires a token: set FARHAND_TOKEN"), ("wrong", "check FARHAND_TOKEN"), ("ünï", "check FARHAND_TOKEN")],
)
def test_a_token_that_is_missing_or_wrong(
    shared_gateway: GatewayProcess, tmp_path: Path, token: str, says: str
) -> None:
    done = Command(tmp_path, FARHAND_TOKEN=token)("nodes", "--url", shared_gateway.url)
    assert done.status == 1 and says in done.err and done.err.count("\n") == 1
    as_json = Command(tmp_path, FARHAND_TOKEN=token)("nodes", "--url", shared_gateway.url, "--json")
    assert as_json.json()["error"]["code"] == "unauthorized"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("ftp://127.0.0.1", "usage"),
        ("http://", "usage"),
        ("http://127.0.0.1:99999", "usage"),
        ("http://127.0.0.1:x", "usage"),
        ("http://a b", "usage"),
        ("http://no-such-host.invalid:3210", "no_gateway"),
        ("http://127.0.0.1:1", "no_gateway"),
    ],
)
def test_an_address_that_leads_nowhere(tmp_path: Path, url: str, code: str) -> None:
    done = Command(tmp_path)("nodes", "--url", url, "--json")
    assert done.json()["error"]["code"] == code and done.status == (2 if code == "usage" else 1)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", "connection_lost"),
        (b"nonsense\r\n\r\n", "not_a_gateway"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<ht>", "not_a_gateway"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n{", "connection_lost"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\n<ht>", "http_502"),
        (b'HTTP/1.1 500 No\r\ncontent-length: 12\r\n\r\n{"error":[]}', "http_500"),
    ],
)
def test_an_answer_no_gateway_gives(tmp_path: Path, answer: bytes, code: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        done = Command(tmp_path)("nodes", "--url", f"127.0.0.1:{server.getsockname()[1]}", "--json")
        thread.join(60)
    assert done.status == 1 and done.json()["error"]["code"] == code


def test_tls_is_checked_against_the_named_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "unrelated.pem")
    options = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    with GatewayProcess(tmp_path / "home", *options) as gateway:
        at = ("--url", gateway.url.replace("http:", "https:"))
        # Another home, so that the certificate is not known from there.
        command = Command(tmp_path / "other", FARHAND_TOKEN=(gateway.home / "token").read_text().strip())
        for untrusting in (command, command.with_env(FARHAND_CA_FILE=str(tmp_path / "unrelated.pem"))):
            refused = untrusting("nodes", *at)
            assert refused.status == 1 and "not trusted" in refused.err and "FARHAND_CA_FILE" in refused.err
        assert command.with_env(FARHAND_CA_FILE=str(tmp_path / "ca.pem"))("nodes", *at).status == 0
        missing = command.with_env(FARHAND_CA_FILE="/nowhere.pem")("nodes", *at, "--json")
        assert missing.json()["error"]["code"] == "usage"
        plain = command("nodes", "--url", gateway.url)
        assert plain.status == 1 and plain.err.count("\n") == 1
    assert ssl.OPENSSL_VERSION


def test_the_gateway_of_the_home_is_known_by_exactly_its_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    shown, other = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(shown.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
    shown.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    # A relative path, read by commands that run in another folder.
    options = ["--tls-cert", os.path.relpath(chain, ROOT), "--tls-key", str(tmp_path / "key.pem")]
    with GatewayProcess(tmp_path / "home", *options) as gateway:
        command = Command(gateway.home)
        own = run_process([*FARHAND, "nodes"], env=command.env, cwd=tmp_path)
        assert own.returncode == 0, own.stderr
        # As if another server of the same authority answered at this address.
        chain.write_bytes(other.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
        for one in (command, command.with_env(FARHAND_CA_FILE=str(tmp_path / "ca.pem"))):
            refused = one("nodes")
            assert refused.status == 1 and "not trusted" in refused.err
        chain.write_bytes(b"")
        assert command("nodes", "--json").json()["error"]["code"] == "usage"


def test_an_open_gateway_needs_no_token(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", "--open") as gateway:
        assert Command(tmp_path / "other")("nodes", "--url", gateway.url).status == 0


def test_a_gateway_that_stops_in_the_middle_of_a_call(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = Command(tmp_path).start("call", "x", "--url", f"127.0.0.1:{server.getsockname()[1]}", "--json")
        peer, _ = server.accept()
        peer.recv(65536)
        peer.close()
        out, _ = process.communicate(timeout=60)
    error = json.loads(out)["error"]
    assert error["code"] == "connection_lost" and "`farhand calls`" in error["message"]


def test_help_needs_nothing_of_the_gateway() -> None:
    code = (
        "import sys\nfrom farhand.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('msgspec', 'apsw', 'uvicorn', 'rich', 'asyncio')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("[]\n"), out


@pytest.mark.parametrize(
    "name", ["up", "gateway", "node", "call", "tools", "nodes", "calls", "ps", "attach", "events", "token", "doctor"]
)
def test_every_command_has_help(name: str, tmp_path: Path) -> None:
    done = Command(tmp_path)(name, "--help")
    assert done.status == 0 and done.out.startswith(f"Usage: farhand {name}")


def test_an_unknown_command(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command("nonsense").status == 2
    assert command("nonsense", "--json").json()["error"]["code"] == "usage"
    assert command("nodes", "--bogus", "--json").json()["error"]["code"] == "usage"
    bare = command()
    assert bare.status == 2 and bare.err.startswith("Usage: farhand")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line(command: Command, options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "farhand", "tools", *options],
            check=False, env=command.env, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1 and done.stderr == "farhand: No space left on device\n"


def test_a_reader_that_leaves_early_does_not_cause_a_crash(shared_gateway: GatewayProcess, command: Command) -> None:
    pipe_out, pipe_in = os.pipe()
    os.close(pipe_out)
    process = subprocess.Popen(
        [sys.executable, "-m", "farhand", "nodes", "--json"], env=command.env, stdout=pipe_in, stderr=subprocess.PIPE
    )
    os.close(pipe_in)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141 and err == b""


def test_a_port_without_a_server(tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text(json.dumps({"url": f"http://127.0.0.1:{free_port()}", "pid": os.getpid()}))
    assert "nothing answers" in Command(tmp_path)("nodes").err


NO_TEXT = os.fsdecode(b"\xff")


@pytest.mark.parametrize(
    "arguments",
    [
        ["logs", NO_TEXT],
        ["calls", "--node", NO_TEXT],
        ["sessions", "show", NO_TEXT],
        ["memory", "search", NO_TEXT],
        ["call", "x", "--session", NO_TEXT],
        ["message", "send", "hi", "--id", NO_TEXT],
    ],
)
def test_binary_data_is_named(command: Command, arguments: list[str]) -> None:
    done = command(*arguments)
    assert (done.status, done.out) == (2, "") and "Traceback" not in done.err and done.err.startswith("farhand: ")
    as_json = command(*arguments, "--json")
    assert (as_json.status, as_json.err, as_json.json()["error"]["code"]) == (2, "", "usage")


@pytest.mark.parametrize(
    "arguments",
    [
        ["node", "pair", "--expires", "nan"],
        ["cron", "run", "--due", "--wait", "inf"],
        ["log", "--day", "9999-12-31"],
        ["log", "--day", "0001-01-01"],
        ["audit", "verify", "--from", "9" * 30],
        ["config", "get", ""],
        ["bench", "--seconds", "nan"],
    ],
)
def test_values_that_make_no_sense(command: Command, arguments: list[str]) -> None:
    done = command(*arguments, "--json")
    assert (done.status, done.err, done.json()["error"]["code"]) == (2, "", "usage")


@pytest.mark.parametrize("span", ["9" * 400 + "d", "99999999999d"])
def test_a_span_of_all_time_begins_with_the_journal(command: Command, span: str) -> None:
    first = command("log", "--since", span, "--limit", "100000", "--json").json()["events"][0]
    assert first["id"] == 1


@pytest.mark.parametrize("name", ["FARHAND_HOME", "--home"])
def test_the_home_of_a_user_who_is_not_there(tmp_path: Path, name: str) -> None:
    home = "~nobody-of-that-name/x"
    command = Command(tmp_path, FARHAND_HOME=home) if name == "FARHAND_HOME" else Command(tmp_path)
    done = command("nodes", *([] if name == "FARHAND_HOME" else [name, home]))
    assert done.status == 1 and home in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["nodes"], ["nodes", "--json"], ["message", "list"], ["doctor"]])
def test_with_its_output_closed_a_command_does_what_it_does(command: Command, arguments: list[str]) -> None:
    words = [sys.executable, "-m", "farhand", *arguments]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words],
        check=False, env=command.env, stderr=subprocess.PIPE, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["call", "node.ping", "-"], ["chat"]])
def test_with_its_input_closed_there_is_nothing_to_read(command: Command, arguments: list[str]) -> None:
    words = [sys.executable, "-m", "farhand", *arguments, "--json"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *words],
        check=False, env=command.env, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "usage")
