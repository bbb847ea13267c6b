"""`farhand cp` against a real gateway and node."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.cli.client import Client, ClientError
from farhand.cli.copy.transfers import follow
from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess, Proxy, wait_until


@pytest.fixture(scope="module")
def node(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("node"), "box") as process:
        yield process


def cp(node: NodeProcess, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FARHAND_HOME": str(node.gateway.home)}
    return run_process([*FARHAND, "cp", *arguments], env=environment, cwd=cwd)


def done(node: NodeProcess, *arguments: str, cwd: Path | None = None) -> Any:
    finished = cp(node, *arguments, "--json", cwd=cwd)
    assert finished.returncode == 0, finished
    return json.loads(finished.stdout)


def test_from_node_to_node(node: NodeProcess) -> None:
    (node.workspace / "a").write_bytes(b"a" * 3_000_000)
    answer = done(node, "box:a", "box:b/")
    assert answer["bytesTransferred"] == 3_000_000 and answer["state"] == "ok"
    assert (node.workspace / "b" / "a").read_bytes() == b"a" * 3_000_000


def test_from_here_to_a_node_and_back(node: NodeProcess, tmp_path: Path) -> None:
    content = os.urandom(20_000_000)
    (tmp_path / "local.bin").write_bytes(content)
    assert done(node, "./local.bin", "box:up/", cwd=tmp_path)["bytesTransferred"] == len(content)
    assert (node.workspace / "up" / "local.bin").read_bytes() == content
    assert done(node, "box:up/local.bin", "back.bin", cwd=tmp_path)["bytesTransferred"] == len(content)
    assert (tmp_path / "back.bin").read_bytes() == content
    (tmp_path / "empty").touch()
    done(node, "empty", "box:empty", cwd=tmp_path)
    done(node, "box:empty", "empty-back", cwd=tmp_path)
    assert (node.workspace / "empty").read_bytes() == (tmp_path / "empty-back").read_bytes() == b""


def test_folders_both_ways(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "tree" / "in").mkdir(parents=True)
    (tmp_path / "tree" / "in" / "x").write_text("x")
    (tmp_path / "tree" / "y").write_text("y")
    assert done(node, "tree", "box:tree", cwd=tmp_path)["files"] == 2
    assert done(node, "box:tree", "./", cwd=tmp_path / "tree" / "in")["bytesTransferred"] == 2
    assert (tmp_path / "tree" / "in" / "tree" / "in" / "x").read_text() == "x"


def test_a_folder_goes_into_an_existing_one_and_its_programs_can_be_run(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "kit" / "run").chmod(0o755)
    (node.workspace / "place").mkdir()
    done(node, "kit", "box:place", cwd=tmp_path)
    assert [path.name for path in (node.workspace / "place").iterdir()] == ["kit"]
    assert os.access(node.workspace / "place" / "kit" / "run", os.X_OK)


def test_skipped_entries_of_a_folder_are_reported(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "odd" / "hollow").mkdir(parents=True)
    (tmp_path / "odd" / "file").write_text("x")
    (tmp_path / "odd" / "away").symlink_to("hollow")
    os.mkfifo(tmp_path / "odd" / "pipe")
    finished = cp(node, "odd", "box:odd", cwd=tmp_path)
    assert finished.returncode == 0
    assert finished.stderr.splitlines()[:-1] == [
        "skipped away: it is a link",
        "skipped hollow: it is an empty folder",
        "skipped pipe: it is not a file",
    ]


def test_errors_without_json(node: NodeProcess) -> None:
    (node.workspace / "said").write_text("said")
    finished = cp(node, "box:said", "box:said-again")
    assert finished.returncode == 0 and finished.stdout == "" and "4 bytes copied" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (("box:missing", "box:x"), 1, "not_found"),
        (("box:missing", "here"), 1, "not_found"),
        (("missing-here", "box:x"), 1, "not_found"),
        (("ghost:/x", "box:x"), 1, "not_found"),
        (("a", "b"), 2, "usage"),
        (("gsv:a", "gsv:b"), 1, "invalid_args"),
    ],
)
def test_failures(node: NodeProcess, tmp_path: Path, arguments: tuple[str, ...], status: int, code: str) -> None:
    finished = cp(node, *arguments, "--json", cwd=tmp_path)
    assert finished.returncode == status, finished
    assert json.loads(finished.stdout)["error"]["code"] == code
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_is_refused_says_why(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(30_000_000))
    (node.workspace / "folder.d" / "large").mkdir(parents=True)
    finished = cp(node, "large", "box:folder.d/", "--json", cwd=tmp_path)
    assert finished.returncode == 1 and "directory" in finished.stdout, finished


def refused(node: NodeProcess, *arguments: str, cwd: Path) -> str:
    """The one line a copy that failed says."""
    finished = cp(node, *arguments, cwd=cwd)
    assert finished.returncode == 1 and len(finished.stderr.splitlines()) == 1, finished
    return finished.stderr


def in_workspace(node: NodeProcess, path: str) -> bool:
    return node.gateway.request("GET", f"/v1/workspace/main/{path}").status == 200


# -- to here ---------------------------------------------------------------------------------------------------------


def test_a_folder_does_not_take_the_place_of_a_file_here(node: NodeProcess, tmp_path: Path) -> None:
    (node.workspace / "stack" / "in").mkdir(parents=True)
    (node.workspace / "stack" / "in" / "f").write_text("new")
    (tmp_path / "afile").write_text("keep")
    assert "afile" in refused(node, "box:stack", "afile", cwd=tmp_path)
    assert (tmp_path / "afile").read_text() == "keep"
    (tmp_path / "stack").mkdir()
    (tmp_path / "stack" / "in").write_text("keep")
    assert "stack/in" in refused(node, "box:stack", ".", cwd=tmp_path)
    assert (tmp_path / "stack" / "in").read_text() == "keep"


def test_a_file_that_is_replaced_here_keeps_its_mode(node: NodeProcess, tmp_path: Path) -> None:
    (node.workspace / "secret").write_text("new")
    (tmp_path / "private").write_text("old")
    (tmp_path / "private").chmod(0o600)
    done(node, "box:secret", "private", cwd=tmp_path)
    assert (tmp_path / "private").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


def test_a_new_file_here_has_the_mode_of_the_umask_and_can_be_run_if_the_source_could(
    node: NodeProcess, tmp_path: Path
) -> None:
    (node.workspace / "tools").mkdir()
    for name, mode in (("run", 0o755), ("read", 0o644)):
        (node.workspace / "tools" / name).write_text("x")
        (node.workspace / "tools" / name).chmod(mode)
    before = os.umask(0o027)
    try:
        done(node, "box:tools", "tools", cwd=tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tools").iterdir()}
    assert modes == {"run": 0o750, "read": 0o640}


def test_private_files_stay_private_and_programs_stay_executable(node: NodeProcess, tmp_path: Path) -> None:
    there = node.workspace / "alone"
    for folder in (there, tmp_path / "alone"):
        (folder / "keys").mkdir(parents=True)
        (folder / "keys").chmod(0o700)
        for name, mode in (("key", 0o600), ("run", 0o755), ("private-run", 0o700), ("keys/in", 0o644)):
            (folder / name).write_text("x")
            (folder / name).chmod(mode)
    before = os.umask(0o022)
    try:
        for name in ("key", "run", "private-run", "keys"):
            done(node, f"alone/{name}", f"box:came/{name}", cwd=tmp_path)
            done(node, f"box:alone/{name}", f"came-{name}", cwd=tmp_path)
    finally:
        os.umask(before)

    def modes(*paths: Path) -> list[int]:
        return [stat.S_IMODE(path.stat().st_mode) for path in paths]

    came = node.workspace / "came"
    assert modes(came / "key", came / "run", came / "private-run", came / "keys" / "in") == [0o600, 0o755, 0o700, 0o600]
    assert modes(*(tmp_path / f"came-{name}" for name in ("key", "run", "private-run"))) == [0o600, 0o755, 0o700]
    assert modes(tmp_path / "came-keys", tmp_path / "came-keys" / "in") == [0o700, 0o600]


def test_a_link_here_is_written_through(node: NodeProcess, tmp_path: Path) -> None:
    (node.workspace / "fresh").write_text("fresh")
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    done(node, "box:fresh", "link", cwd=tmp_path)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "fresh"


def test_a_local_path_that_is_not_a_file_is_not_replaced(node: NodeProcess, tmp_path: Path) -> None:
    (node.workspace / "fresh").write_text("fresh")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(node, "box:fresh", "pipe", cwd=tmp_path)
    assert (tmp_path / "pipe").is_fifo()


def test_the_bar_knows_how_much_there_is_to_fetch(node: NodeProcess, tmp_path: Path) -> None:
    (node.workspace / "long").write_bytes(bytes(5 << 20))
    shown = Command(node.gateway.home).on_terminal("cp", "box:long", str(tmp_path / "long"))
    assert "5.0/5.0 MiB" in shown


@pytest.fixture
def slow_line(node: NodeProcess) -> Iterator[tuple[Proxy, Command]]:
    """The command, at the end of a line that stops after some of a long file has come."""
    with Proxy(node.gateway.port) as proxy:
        proxy.pace = 0.5
        url = f"http://127.0.0.1:{proxy.port}"
        yield proxy, Command(node.gateway.home, FARHAND_URL=url, FARHAND_TOKEN=node.gateway.token)


@pytest.mark.parametrize(("number", "left"), [(signal.SIGINT, 0), (signal.SIGKILL, 1)])
def test_a_fetch_that_was_stopped_is_not_in_the_way_of_the_next(
    node: NodeProcess, slow_line: tuple[Proxy, Command], tmp_path: Path, number: signal.Signals, left: int
) -> None:
    proxy, command = slow_line
    content = os.urandom(20 << 20)
    (node.workspace / "lengthy").write_bytes(content)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "lengthy").write_text("old")
    running = command.start("cp", "box:lengthy", str(folder / "lengthy"))
    wait_until(lambda: list(folder.glob(".farhand-*")), 30, "a part beside")
    running.send_signal(number)
    running.communicate(timeout=60)
    proxy.pace = 0
    assert (folder / "lengthy").read_text() == "old"
    assert len(list(folder.glob(".farhand-*"))) == left
    done(node, "box:lengthy", "lengthy", cwd=folder)
    assert (folder / "lengthy").read_bytes() == content
    assert done(node, "folder", f"gsv:stopped-{number}", cwd=tmp_path)["files"] == 1  # what is left is not copied


# -- from here -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/etc/passwd", "../beside", "../gone", "here/.."])
def test_a_link_that_leads_out_of_a_folder_is_an_error_before_anything_is_sent(
    node: NodeProcess, tmp_path: Path, target: str
) -> None:
    (tmp_path / "beside").write_text("secret")
    (tmp_path / "leaky").mkdir()
    (tmp_path / "leaky" / "a").write_text("a")
    (tmp_path / "leaky" / "here").symlink_to(".")
    (tmp_path / "leaky" / "out").symlink_to(target)
    said = refused(node, "leaky", "box:leaky", cwd=tmp_path)
    assert "'out', which points outside it" in said and target in said
    assert not (node.workspace / "leaky").exists()


def test_a_link_that_is_named_is_followed(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("real")
    (tmp_path / "named").symlink_to("real")
    done(node, "named", "box:through/", cwd=tmp_path)
    assert (node.workspace / "through" / "named").read_text() == "real"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("pipe", "a named pipe, not a regular file"),
        ("/dev/zero", "a device, not a regular file"),
        ("/proc/version", "its size is unknown"),
    ],
)
def test_a_local_path_that_is_not_a_regular_file_is_refused(
    node: NodeProcess, tmp_path: Path, source: str, reason: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert reason in refused(node, source, "gsv:special", cwd=tmp_path)
    assert not in_workspace(node, "special")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("b\nb", "control character"), ("/".join(["b" * 255] * 4), "longer than")],
)
def test_a_name_the_workspace_cannot_have_is_found_out_before_anything_is_sent(
    node: NodeProcess, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "mixed" / name).parent.mkdir(parents=True)
    (tmp_path / "mixed" / "a").write_text("a")
    (tmp_path / "mixed" / name).write_text("b")
    assert reason in refused(node, "mixed", "gsv:mixed", cwd=tmp_path)
    assert not in_workspace(node, "mixed")


def test_a_name_that_is_not_utf_8_is_found_out_before_anything_is_sent(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "a").write_text("a")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bytes/\xff")).write_text("b")
    assert "only names in UTF-8" in refused(node, "bytes", "box:bytes", cwd=tmp_path)
    assert not (node.workspace / "bytes").exists()


def test_too_many_files_for_the_workspace_are_found_out_before_any_is_sent(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(257):
        (tmp_path / "many" / str(number)).touch()
    assert "the limit is 256" in refused(node, "many", "gsv:many", cwd=tmp_path)
    assert not in_workspace(node, "many")


def test_a_folder_that_meets_a_file_there_is_found_out_before_anything_is_sent(
    node: NodeProcess, tmp_path: Path
) -> None:
    (tmp_path / "meet" / "z").mkdir(parents=True)
    (tmp_path / "meet" / "a").write_text("a")
    (tmp_path / "meet" / "z" / "q").write_text("q")
    (node.workspace / "met" / "meet").mkdir(parents=True)
    (node.workspace / "met" / "meet" / "z").write_text("file")
    assert "is a file, and the source is a folder" in refused(node, "meet", "box:met", cwd=tmp_path)
    assert [path.name for path in (node.workspace / "met" / "meet").iterdir()] == ["z"]
    assert "is a file" in refused(node, "meet", "box:met/meet/z", cwd=tmp_path)


def test_a_folder_that_fails_in_the_middle_tells_what_is_in_place(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    for name in "abc":
        (tmp_path / "torn" / name).write_text(name)
    (node.workspace / "torn").mkdir()
    os.mkfifo(node.workspace / "torn" / "b")  # no listing tells of it
    done_before = refused(node, "torn", "box:./", cwd=tmp_path)
    assert "copied: a; not copied: b, c" in done_before
    error = json.loads(cp(node, "torn", "box:./", "--json", cwd=tmp_path).stdout)["error"]
    assert error["details"] == {"in_place": ["a"], "perhaps": [], "not_copied": ["b", "c"]}


# -- while the gateway is away ---------------------------------------------------------------------------------------


def test_a_copy_between_nodes_continues_when_the_gateway_was_restarted(gateway: GatewayProcess, tmp_path: Path) -> None:
    with (
        Proxy(gateway.port) as proxy,
        NodeProcess(gateway, tmp_path / "one", "one") as one,
        NodeProcess(gateway, tmp_path / "two", "two", url=f"http://127.0.0.1:{proxy.port}") as two,
    ):
        content = os.urandom(20 << 20)
        (one.workspace / "file").write_bytes(content)
        proxy.freeze()
        running = Command(gateway.home).start("cp", "one:file", "two:file")
        wait_until(lambda: gateway.get("/v1/transfers")["transfers"], 30, "a transfer")
        gateway.kill()
        proxy.cut()
        proxy.thaw()
        assert running.stderr is not None
        assert "the gateway does not answer" in running.stderr.readline()
        gateway.start()
        _, said = running.communicate(timeout=90)
        assert running.returncode == 0, said
        assert (two.workspace / "file").read_bytes() == content


class LosesAnAnswer(Proxy):
    """The line breaks with the answer to the transfer that was asked for, and stays broken until `admit`."""

    lost = False

    def spoiled(self, data: bytes) -> bytes:
        if data.startswith(b"HTTP/1.1 202") and not self.lost:
            self.lost = True
            self.cut(refuse=True)
        return data


def test_a_copy_whose_answer_was_lost_is_found_although_its_node_left(gateway: GatewayProcess, tmp_path: Path) -> None:
    with LosesAnAnswer(gateway.port) as proxy, NodeProcess(gateway, tmp_path / "one", "one") as one:
        (one.workspace / "file").write_text("once")
        url = f"http://127.0.0.1:{proxy.port}"
        command = Command(gateway.home, FARHAND_URL=url, FARHAND_TOKEN=gateway.token)
        running = command.start("cp", "one:file", "one:copy")
        wait_until(lambda: proxy.lost, 30, "a lost answer")
        wait_until(lambda: gateway.get("/v1/transfers")["transfers"][0]["state"] == "ok", 30, "the end")
        one.stop()
        gateway.wait_for_node("one", online=False)
        proxy.admit()
        _, said = running.communicate(timeout=60)
        assert running.returncode == 0, said
        assert len(gateway.get("/v1/transfers")["transfers"]) == 1


def test_giving_up_on_the_gateway_reports_that_the_transfer_continues(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path / "one", "one") as one:
        (one.workspace / "file").write_text("x")
        body = {"source": "one:file", "destination": "one:again", "background": True}
        begun = gateway.request("POST", "/v1/transfers", body).json()["id"]
        gateway.kill()
        with pytest.raises(ClientError, match=f"transfer {begun} continues when the gateway is back"):
            follow(Client(str(gateway.home)), begun, lambda _done, _total: None, patience=0)
