"""Every documented combination of start options: a node joins and a tool call on it succeeds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.node.names import default_node_id
from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import GatewayProcess

SECRET = "a-token-for-nodes"
LENT = "lent"
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "no-token": {"SA_NODE_TOKEN": None},
    "SA_NODE_TOKEN": {"SA_NODE_TOKEN": SECRET},
    "SA_NODE_TOKENS": {"SA_NODE_TOKEN": None, "SA_NODE_TOKENS": f"{LENT}:{SECRET},other:else"},
    "both": {"SA_NODE_TOKEN": "shared", "SA_NODE_TOKENS": f"{LENT}:{SECRET}"},
    "own-id": {"SA_NODE_TOKEN": None, "SA_NODE_TOKENS": f"{default_node_id()}:else,{LENT}:{SECRET}"},
}
STARTS = [("up",), ("up", "--no-node"), ("gateway",)]
COMBINATIONS = [
    (start, open_, env)
    for start, open_, env in itertools.product(STARTS, [(), ("--open",)], ENVIRONMENTS)
    if start == ("up",) or env in ("no-token", "SA_NODE_TOKEN", "SA_NODE_TOKENS")
]
if os.environ.get("FARHAND_SIEGE") != "long":
    # Every second one: each start with and without --open, and each environment, is among them.
    COMBINATIONS = COMBINATIONS[::2]


@pytest.fixture(scope="module")
def used_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that earlier starts have left behind."""
    home = tmp_path_factory.mktemp("used") / "home"
    with GatewayProcess(home, env=ENVIRONMENTS["no-token"]):
        pass
    return home


@contextlib.contextmanager
def lent_machine(gateway: GatewayProcess, folder: Path, token: str | None) -> Iterator[None]:
    """`farhand node` beside a gateway, with a home of its own; no token: it has none at all."""
    command = Command(folder / "node-home", **({} if token is None else {"SA_NODE_TOKEN": token}))
    log = folder / "node.log"
    with log.open("ab") as written:
        process = start_process(
            [*FARHAND, "node", "--gateway", gateway.url, "--id", LENT],
            command.env, cwd=folder, stdout=written, stderr=written,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def expect_call(gateway: GatewayProcess, node_id: str, workspace: Path) -> None:
    """The node is there, and its shell works in the workspace it was given."""
    try:
        gateway.wait_for_node(node_id, seconds=60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{gateway.log.read_text()[-2000:]}") from None
    answer = gateway.invoke(f"{node_id}__Bash", {"command": "pwd"})
    assert answer["ok"], answer
    assert Path(answer["result"]["output"].strip()) == workspace


def start_and_call(gateway: GatewayProcess, start: tuple[str, ...], folder: Path, workspace: Path | None) -> None:
    """Start, expect this machine's node where there is to be one, and lend a machine where there is a way to."""
    folder.mkdir(parents=True, exist_ok=True)
    with gateway:
        if start == ("up",):
            expect_call(gateway, default_node_id(), workspace or gateway.home / "agents" / "main")
        environment = gateway.environment
        can_join = "SA_NODE_TOKEN" in environment or "SA_NODE_TOKENS" in environment
        if can_join or "--open" in gateway.arguments:
            with lent_machine(gateway, folder, SECRET if can_join else None):
                expect_call(gateway, LENT, folder)
        names = {node["node_id"] for node in gateway.get("/v1/nodes")["nodes"] if node["online"]}
        assert (default_node_id() in names) == (start == ("up",))
        assert gateway.request("GET", "/v1/nodes", token="owner").status == 200
        refused = gateway.request("GET", "/v1/nodes", token=None)
        assert refused.status == (200 if "--open" in gateway.arguments else 401)
        # The lent machine's own process has ended, and a node that was refused would have said so.
        assert "was refused" not in gateway.log.read_text()


def gateway_for(
    home: Path, start: tuple[str, ...], *arguments: str, env: dict[str, str | None], log: Path
) -> GatewayProcess:
    gateway = GatewayProcess(home, *start[1:], *arguments, command=start[0], env=env)
    gateway.log = log
    return gateway


@pytest.mark.siege
@pytest.mark.parametrize(
    ("start", "open_", "env"),
    COMBINATIONS,
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "closed",
)
def test_every_combination_on_a_used_home(
    used_home: Path, tmp_path: Path, start: tuple[str, ...], open_: tuple[str, ...], env: str
) -> None:
    gateway = gateway_for(used_home, start, *open_, env=ENVIRONMENTS[env], log=tmp_path / "log")
    start_and_call(gateway, start, tmp_path / "lent", None)


@pytest.mark.parametrize("open_", [(), ("--open",)], ids=["closed", "open"])
def test_a_fresh_home_named_by_an_option_and_a_workspace(tmp_path: Path, open_: tuple[str, ...]) -> None:
    """`--home` and `--workspace`, neither of which is there yet."""
    home, workspace = tmp_path / "named", tmp_path / "work"
    gateway = gateway_for(
        home, ("up",), "--home", str(home), "--workspace", str(workspace), *open_,
        env={"SA_NODE_TOKEN": None, "FARHAND_HOME": str(tmp_path / "unused")}, log=tmp_path / "log",
    )  # fmt: skip
    start_and_call(gateway, ("up",), tmp_path / "lent", workspace)
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
@pytest.mark.parametrize("start", [("up",), ("gateway",)], ids=lambda start: start[0])
def test_every_address(used_home: Path, tmp_path: Path, host: str, start: tuple[str, ...]) -> None:
    env = {**ENVIRONMENTS["SA_NODE_TOKEN"], "FARHAND_GATEWAY_TLS": "off"}
    gateway = gateway_for(used_home, start, "--host", host, env=env, log=tmp_path / "log")
    start_and_call(gateway, start, tmp_path / "lent", None)


def test_open_after_closed_and_back_on_one_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for number, arguments in enumerate([(), ("--open",), (), ("--open",), ("--open",)]):
        log = tmp_path / f"log-{number}"
        gateway = gateway_for(home, ("up",), *arguments, env={"SA_NODE_TOKEN": None}, log=log)
        start_and_call(gateway, ("up",), tmp_path / f"lent-{number}", None)


def test_a_node_keeps_its_own_token_while_the_gateway_is_open(tmp_path: Path) -> None:
    """A node's token is valid before, during and after `--open`, and no other node can take its id."""
    home = tmp_path / "home"
    token = ""
    for number, arguments in enumerate([(), ("--open",), ()]):
        gateway = gateway_for(home, ("gateway",), *arguments, env={"SA_NODE_TOKEN": None}, log=tmp_path / "log")
        with gateway:
            if not token:
                made = gateway.request("POST", "/v1/tokens", {"node_id": LENT})
                assert made.status == 201, made
                token = made.json()["token"]
            folder = tmp_path / f"lent-{number}"
            folder.mkdir()
            with lent_machine(gateway, folder, token):
                expect_call(gateway, LENT, folder)
            stranger = Command(tmp_path / "stranger")("node", "--gateway", gateway.url, "--id", LENT)
            assert stranger.status == 1
            assert ("has its own token" if arguments else "invalid or missing node token") in stranger.err


@pytest.mark.parametrize("command", ["up", "gateway"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_open_is_refused_where_others_could_connect(tmp_path: Path, command: str, host: str) -> None:
    done = Command(tmp_path / "home")(command, "--open", "--host", host, "--port", "0")
    assert (done.status, done.out) == (1, "")
    assert "--open needs a loopback address" in done.err and host in done.err


def test_open_is_refused_for_an_address_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "farhand.toml").write_text('[gateway]\nhost = "0.0.0.0"\n')
    assert "--open needs a loopback address" in Command(tmp_path / "home")("up", "--open", "--port", "0").err
    by_variable = Command(tmp_path / "other", FARHAND_GATEWAY_HOST="0.0.0.0")
    assert "--open needs a loopback address" in by_variable("up", "--open", "--port", "0").err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("arguments", [("up",), ("gateway",), ("up", "--json")], ids=" ".join)
def test_a_stop_before_it_serves_ends_it_cleanly(
    tmp_path: Path, arguments: tuple[str, ...], number: signal.Signals
) -> None:
    """Whenever the signal comes: while the program loads, opens its store, and just before it serves."""
    command = Command(tmp_path / "home")
    for delay in (0.0, 0.2, 0.4):
        process = subprocess.Popen(
            [sys.executable, "-m", "farhand", *arguments, "--port", "0"],
            env=command.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        wait_for_handler(process.pid)
        time.sleep(delay)  # waits for nothing: the signal may come at any moment from here on
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        if "--json" in arguments:
            assert json.loads(out)["ready"] in (True, False)
    with GatewayProcess(tmp_path / "home") as gateway:  # nothing it left behind is in the way
        assert gateway.get("/v1/health")["status"] == "ok"


def wait_for_handler(pid: int) -> None:
    """Wait until the program handles SIGTERM; before that, the interpreter itself is still loading."""
    status = Path(f"/proc/{pid}/status")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        caught = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("SIGTERM is not handled")
