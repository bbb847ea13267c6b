"""`farhand run`: as ssh, with the outputs, the input and the exit status of the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import FARHAND, ForkedProcess, run_process, start_process
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

SLOW = 120


class Runner:
    """Runs `farhand` against a gateway."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway

    def environment(self, token: str | None = None) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_"))}
        return {**clean, "FARHAND_URL": self.gateway.url, "FARHAND_TOKEN": token or self.gateway.token}

    def __call__(self, *words: str, token: str | None = None, **options: Any) -> subprocess.CompletedProcess[bytes]:
        return run_process([*FARHAND, *words], env=self.environment(token), text=False, timeout=SLOW, **options)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes] | ForkedProcess:
        return start_process([*FARHAND, *words], self.environment(), **options)


@pytest.fixture
def farhand(shared_gateway: GatewayProcess, hands: NodeProcess) -> Iterator[Runner]:
    yield Runner(shared_gateway)


def test_outputs_are_separate_and_the_status_is_the_commands_own(farhand: Runner) -> None:
    done = farhand("run", "hands", "--", "sh", "-c", "printf 'out\\0'; printf err >&2; exit 42")
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out\0", b"err")


def test_words_arrive_as_they_are_and_one_with_blanks_is_a_line(farhand: Runner) -> None:
    words = ["a  b", "$HOME", "c'd\"e", "*", "", "-x", "ü\n2"]
    done = farhand("run", "hands", "--", "printf", "%s|", *words)
    assert done.stdout.decode() == "".join(f"{word}|" for word in words)
    assert farhand("run", "hands", "--", "echo $((40+2)) | cat").stdout == b"42\n"
    assert farhand("run", "hands", "echo", "--", "-n").stdout == b"-- -n\n"  # what follows NODE is the command's
    assert farhand("run", "hands", "--", "echo;id").returncode == 127  # one word without blanks is a program


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--", "sh", "-c", "kill -9 $$"], 128 + 9),
        (["--", "kill -TERM $$; sleep 1000"], 128 + 15),
        (["--", "no-such-program"], 127),
        (["--", "/etc/passwd"], 126),
        (["--", "sh", "-c", "exit 125"], 125),
    ],
)
def test_exit_statuses(farhand: Runner, words: list[str], status: int) -> None:
    assert farhand("run", "hands", *words).returncode == status


def test_a_failure_of_farhand_is_status_125(farhand: Runner) -> None:
    done = farhand("run", "hand", "--", "true")
    assert done.returncode == 125 and b"there is no node 'hand'" in done.stderr and done.stdout == b""
    done = farhand("run", "--url", "http://127.0.0.1:9", "hands", "--", "true")
    assert done.returncode == 125 and b"nothing answers" in done.stderr
    done = farhand("run", "--cwd", "/no/such/folder", "hands", "--", "true")
    assert done.returncode == 125 and b"/no/such/folder" in done.stderr
    assert farhand("run", "hands", "--", "true", token="wrong").returncode == 125
    narrow = farhand.gateway.request(
        "POST", "/v1/tokens", {"name": "reader", "scopes": ["read", "tools.exec"], "tools": ["hands__Read"]}
    ).json()["token"]
    done = farhand("run", "hands", "--", "true", token=narrow)
    assert done.returncode == 125 and b"does not include" in done.stderr
    assert farhand("run", "hands").returncode == 2
    done = farhand("run", "hands", "--timeout", "1s", "--", "true")
    assert done.returncode == 2 and b"before NODE" in done.stderr


def test_a_token_that_may_only_run_commands_can_run_them(farhand: Runner) -> None:
    secret = farhand.gateway.request("POST", "/v1/tokens", {"name": "exec", "scopes": ["tools.exec"]}).json()["token"]
    done = farhand("run", "hands", "--", "tr", "a-z", "A-Z", token=secret, input=b"loud")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"LOUD", b"")
    other = farhand("call", "hands__Bash", "command=echo private", "--json").stdout
    call_id = json.loads(other)["request_id"]
    assert farhand.gateway.request("GET", f"/v1/calls/{call_id}/output", token=secret).status == 403


def test_folder_variables_and_time_limit(farhand: Runner, tmp_path: Path) -> None:
    done = farhand(
        "run", "--cwd", str(tmp_path), "--env", "A=x 'y", "--env", "B=", "hands", "--", "sh", "-c", "pwd; env"
    )
    lines = done.stdout.decode().splitlines()
    assert lines[0] == str(tmp_path) and {"A=x 'y", "B="} <= set(lines)
    assert farhand("run", "--env", "A=x 'y", "hands", "--", 'echo "$A!"').stdout == b"x 'y!\n"
    done = farhand("run", "--timeout", "1s", "hands", "--", "sh", "-c", "echo early; sleep 1000")
    assert (done.returncode, done.stdout) == (124, b"early\n") and b"--timeout" in done.stderr
    for wrong in ("=x", "A", "1A=x", "A B=x"):
        assert farhand("run", "--env", wrong, "hands", "--", "true").returncode == 2


def test_any_bytes_pass_in_any_amount(farhand: Runner, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    done = farhand("run", "hands", "--", "cat", input=data)
    assert done.returncode == 0 and done.stdout == data
    # A command that does not read its input is not in the way.
    assert farhand("run", "hands", "--", "true", input=data).returncode == 0
    assert farhand("run", "hands", "--", "cat").stdout == b""


def test_a_large_output_waits_for_its_reader_and_takes_little_memory(farhand: Runner, hands: NodeProcess) -> None:
    size = 100 * 1024 * 1024
    command = ["run", "hands", "--", "sh", "-c", f"head -c {size} /dev/zero; echo written > large-output-written"]
    running = farhand.start(*command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert running.stdout is not None
    # The command cannot end before most of its output was read: nothing of it is dropped.
    first = running.stdout.read(1000)
    assert first == bytes(1000) and not (hands.workspace / "large-output-written").exists()
    received = len(first)
    most = 0
    while piece := running.stdout.read1(1 << 20):
        received += len(piece)
        status = Path(f"/proc/{running.pid}/status")
        if status.exists() and received % 16 == 0:
            text = status.read_text()
            most = max([most, *(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))])
    assert running.wait(SLOW) == 0 and received == size
    assert most < 100_000  # KiB
    assert (hands.workspace / "large-output-written").exists()


def test_ctrl_c_reaches_the_command(farhand: Runner) -> None:
    script = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done"
    running = farhand.start("run", "hands", "--", "sh", "-c", script, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert running.stdout is not None and running.stdout.readline() == b"ready\n"
    running.send_signal(signal.SIGINT)
    assert running.stdout.read() == b"caught\n" and running.wait(SLOW) == 3
    running = farhand.start("run", "hands", "--", "sh", "-c", "echo ready; exec sleep 1000", stdout=subprocess.PIPE)
    assert running.stdout is not None and running.stdout.readline() == b"ready\n"
    running.send_signal(signal.SIGINT)
    assert running.wait(SLOW) == 130


def test_the_command_ends_with_its_caller(farhand: Runner) -> None:
    running = farhand.start("run", "hands", "--", "sh", "-c", "echo ready; exec sleep 4321", stdout=subprocess.PIPE)
    assert running.stdout is not None and running.stdout.readline() == b"ready\n"
    running.kill()
    running.wait(SLOW)

    def gone() -> bool:
        jobs = farhand.gateway.get("/v1/jobs?node_id=hands")["jobs"]
        return not any(job["running"] and "4321" in job["command"] for job in jobs)

    wait_until(gone, what="the end of the command")
    # Nor does it stay for a reader that has left.
    done = subprocess.run(
        f"{sys.executable} -m farhand run hands -- yes | head -n 1",
        shell=True,
        env=farhand.environment(),
        capture_output=True,
        timeout=SLOW,
        check=False,
    )
    assert done.stdout == b"y\n"


def test_a_detached_command_is_killed_by_any_part_of_its_id(farhand: Runner) -> None:
    done = farhand("run", "--detach", "hands", "--", "sleep", "1000")
    job = done.stdout.decode().strip()
    assert done.returncode == 0 and len(job) == 36
    other = farhand("run", "--detach", "hands", "--", "sleep", "1000").stdout.decode().strip()
    assert farhand("kill", "hands", "").returncode == 1
    done = farhand("kill", "hands", job[:8], "--signal", "NOPE")
    assert done.returncode == 1 and b"no signal 'NOPE'" in done.stderr and b"TERM" in done.stderr
    done = farhand("kill", "hands", job[:8])
    assert done.returncode == 0 and b"ended 1 process" in done.stdout, done
    done = farhand("kill", "hands", other, "--signal", "kill", "--json")
    assert json.loads(done.stdout)["result"]["status"] == "killed"
    done = farhand("kill", "hands", "no-such-job")
    assert done.returncode == 1 and b"there is no command 'no-such-job' on hands" in done.stderr
    done = farhand("attach", "hands", "no-such-job")
    assert done.returncode == 1 and b"attached" not in done.stderr


def test_an_ambiguous_id_is_refused(farhand: Runner) -> None:
    jobs: list[str] = []
    while len({job[0] for job in jobs}) == len(jobs):  # until two begin alike
        jobs.append(farhand("run", "--detach", "hands", "--", "sleep", "1000").stdout.decode().strip())
    done = farhand("kill", "hands", jobs[-1][0])
    assert done.returncode == 1 and b"give more of the id" in done.stderr and jobs[-1].encode() in done.stderr
    for job in jobs:
        assert farhand("kill", "hands", job, "--signal", "KILL").returncode == 0


def test_json_has_everything_in_one_document(farhand: Runner) -> None:
    done = farhand("run", "--json", "hands", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    document = json.loads(done.stdout)
    assert done.returncode == 3 and document["exitCode"] == 3
    assert (document["stdout"], document["stderr"]) == ("out\n", "err\n")
    done = farhand("run", "--json", "nobody", "--", "true")
    assert done.returncode == 125 and json.loads(done.stdout)["error"]["code"] == "not_found"


def test_it_continues_when_the_gateway_is_killed(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        runner = Runner(gateway)
        script = "echo ready; until test -e go; do sleep 0.1; done; echo done; exit 5"
        running = runner.start(
            "run", "hands", "--", "sh", "-c", script, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert running.stdout is not None and running.stdout.readline() == b"ready\n"
        gateway.kill()
        gateway.start()
        gateway.wait_for_node("hands")
        threading.Timer(0.5, (node.workspace / "go").touch).start()
        assert running.stdout.read() == b"done\n" and running.wait(SLOW) == 5
