"""An agent fixes a repository in a folder that is lent to it, with a secret it never sees.

    python examples/fix_a_repository.py

Everything runs on this machine, in a temporary folder, and is removed at the end: a gateway, a node that lends a folder
with a git repository, and a small server in place of a language model, which says what such a model would say. The
steps:

1. Lend the folder. Its test fails.
2. Give the gateway a secret, and the agent a budget. A policy turns every command of the agent into a trial.
3. Ask the agent to fix the repository. It uses the secret by its name.
4. Review what its command would change, then keep it. The test passes, and a receipt proves what ran.
5. Undo the whole run. The folder is as it was.

It needs `farhand` and `git`, and bubblewrap or a kernel with Landlock for the sandbox of the node.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECRET = "release-key-" + os.urandom(12).hex()
WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
TEST = "from calculator import add\n\nassert add(2, 3) == 5, f'add(2, 3) is {add(2, 3)}'\nprint('the test passes')\n"
SIGN = """\
import hashlib, hmac, os, pathlib
key, code = os.environ["RELEASE_KEY"], pathlib.Path("calculator.py").read_bytes()
pathlib.Path("calculator.sig").write_text(hmac.new(key.encode(), code, hashlib.sha256).hexdigest() + "\\n")
print("signed")
"""
RUN_TEST = "python3 -B test_calculator.py"
FIX = (
    f"sed -i 's/a - b/a + b/' calculator.py && {RUN_TEST} && RELEASE_KEY=\"{{{{secret:RELEASE_KEY}}}}\" python3 sign.py"
)
SETTINGS = """\
[agent]
model = "scripted"

[providers.double]
base_url = "{url}/v1"
api_key = "none"

[models.scripted]
provider = "double"
stream = false
input_cost = 1.0
output_cost = 2.0

[[policy.rules]]
name = "the agent only tries"
tool = "workshop__Bash"
credential = "agent:*"
decision = "trial"
"""


class ScriptedModel:
    """A server with the API of a model; its replies are fixed, and it keeps what it was asked."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.requests: list[bytes] = []
        left, requests = list(replies), self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                requests.append(self.rfile.read(int(self.headers["Content-Length"])))
                message = left.pop(0) if left else {"role": "assistant", "content": "I have nothing more to say."}
                reason = "tool_calls" if "tool_calls" in message else "stop"
                usage = {"prompt_tokens": 400, "completion_tokens": 40, "total_tokens": 440}
                choice = {"index": 0, "message": message, "finish_reason": reason}
                body = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def uses(name: str, **arguments: Any) -> dict[str, Any]:
    """Return the message of a model that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


class Demonstration:
    """A gateway, a node and a scripted model in one folder. Call `close` at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "gateway"
        self.repository = folder / "repository"
        self.model = ScriptedModel(
            uses("workshop__Read", path=str(self.repository / "calculator.py")),
            uses("workshop__Bash", command=RUN_TEST, workdir=str(self.repository)),
            uses("workshop__Bash", command=FIX, workdir=str(self.repository)),
            {"role": "assistant", "content": "add() subtracted. The fix is ready as a trial: review it and keep it."},
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("FARHAND_", "SA_NODE"))}
        self._environment = {**clean, "FARHAND_HOME": str(self.home)}
        self.run_id = self.trial_id = ""

    # -- steps ------------------------------------------------------------------------------------------

    def lend(self) -> str:
        """Make a repository with a bug, start a gateway, and lend the folder to it."""
        self.repository.mkdir(parents=True)
        for name, text in (("calculator.py", WRONG), ("test_calculator.py", TEST), ("sign.py", SIGN)):
            (self.repository / name).write_text(text)
        author = ["-c", "user.name=Owner", "-c", "user.email=owner@example.com"]
        for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "Add a calculator"]):
            subprocess.run(["git", *command], cwd=self.repository, check=True)  # noqa: S607
        self.home.mkdir(parents=True)
        (self.home / "farhand.toml").write_text(SETTINGS.format(url=self.model.url))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self._start("gateway.log", "gateway", "--port", str(port))
        self._until(lambda: self.farhand("nodes", check=False).returncode == 0, "the gateway")
        made = self.json("token", "create", "--node", "workshop")
        self._start(
            "node.log",
            *("node", "--gateway", f"ws://127.0.0.1:{port}/v1/nodes/ws", "--id", "workshop"),
            *("--root", str(self.repository)),
            SA_NODE_TOKEN=made["token"],
            FARHAND_HOME=str(self.folder / "node"),
        )
        self._until(lambda: any(node["online"] for node in self.json("nodes")["nodes"]), "the node")
        return f"The node `workshop` lends {self.repository}, and nothing else. Its test fails: {self.test_result()}"

    def protect(self) -> str:
        """Store the secret for this node and its shell alone, and limit the agent."""
        limits = ("--node", "workshop", "--tool", "workshop__Bash")
        self.farhand("secret", "set", "RELEASE_KEY", *limits, stdin=SECRET.encode())
        self.farhand("budget", "set", "agent:main", "calls=20/day", "money=0.10/day")
        return "The gateway holds the secret RELEASE_KEY. The agent may make 20 calls and spend 10 cents a day."

    def ask(self) -> str:
        """Let the agent work; its commands run as trials."""
        sent = self.json("chat", "-m", "Fix the failing test in the repository, and sign the release.")
        self.run_id, reply = sent["run_id"], sent["reply"]
        calls = self.json("calls", "--tool", "workshop__Bash", "--limit", "1")["calls"]
        self.trial_id = calls[0]["id"]
        return f"The agent says: {reply}\nThe folder has not changed: {self.test_result()}"

    def review(self) -> str:
        """Show what the command would change."""
        shown = self.farhand("trial", "show", self.trial_id).stdout.decode()
        return f"The command of the agent was:\n  {FIX}\nIt would change this:\n{shown.rstrip()}"

    def keep(self) -> str:
        """Apply exactly these changes, and verify the receipt of the command."""
        self.farhand("trial", "keep", self.trial_id)
        receipt = self.folder / "receipt.json"
        self.farhand("receipt", self.trial_id, "-o", str(receipt))
        key = self.json("receipt", "key")["fingerprint"]
        self.farhand("receipt", "verify", str(receipt), "--gateway-key", key)
        signature = (self.repository / "calculator.sig").read_text().strip()
        expected = hmac.new(SECRET.encode(), RIGHT.encode(), hashlib.sha256).hexdigest()
        signed = "with the secret" if signature == expected else "WRONGLY"
        return f"Kept. {self.test_result()} The release is signed {signed}. The receipt of the command is valid."

    def search(self) -> str:
        """Look for the secret wherever the gateway, the node and the model keep or got something."""
        found = self.places_of_the_secret()
        searched = "the model's requests, the transcript, the record, the journal and the logs"
        return f"The secret is in {', '.join(found)}!" if found else f"The secret is in none of {searched}."

    def undo(self) -> str:
        """Undo everything the run changed."""
        plan = self.farhand("undo", "--run", self.run_id, "--dry-run").stdout.decode()
        self.farhand("undo", "--run", self.run_id)
        return f"The undo of the run was planned like this:\n{plan.rstrip()}\nIt is done. {self.test_result()}"

    # -- looking ----------------------------------------------------------------------------------------

    def test_result(self) -> str:
        """Run the test in the folder, outside Farhand, and return its last line."""
        command = [sys.executable, "-B", "test_calculator.py"]
        done = subprocess.run(command, cwd=self.repository, capture_output=True, check=False)
        lines = (done.stdout + done.stderr).decode().strip().splitlines()
        return f"`{lines[-1] if lines else 'no output'}`."

    def changed_files(self) -> list[str]:
        """Return what differs from the commit in the repository."""
        command = ["git", "status", "--porcelain"]
        done = subprocess.run(command, cwd=self.repository, capture_output=True, check=True)
        return [line[3:] for line in done.stdout.decode().splitlines()]

    def places_of_the_secret(self) -> list[str]:
        value = SECRET.encode()
        found = [f"request {number} to the model" for number, body in enumerate(self.model.requests) if value in body]
        for name in ("log", "calls", "sessions", "events"):
            if value in self.farhand(name, "--json", check=False).stdout:
                found.append(f"farhand {name}")
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and self.repository not in path.parents and value in path.read_bytes():
                found.append(str(path))
        return found

    # -- processes --------------------------------------------------------------------------------------

    def farhand(self, *arguments: str, stdin: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run a command of Farhand with this gateway. Raises RuntimeError if it fails."""
        command = [sys.executable, "-m", "farhand", *arguments]
        done = subprocess.run(command, env=self._environment, input=stdin, capture_output=True, check=False)
        if check and done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace")
            raise RuntimeError(f"`farhand {' '.join(arguments)}` failed with status {done.returncode}: {said}")
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.farhand(*arguments, "--json").stdout)

    def _start(self, log: str, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "farhand", *arguments]
        with (self.folder / log).open("wb") as file:
            self._processes.append(
                subprocess.Popen(
                    command, env={**self._environment, **environment}, stdout=file, stderr=file, start_new_session=True
                )
            )

    def _until(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or any(process.poll() is not None for process in self._processes):
                logs = "".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"{what} did not start: {logs}")
            time.sleep(0.2)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        self.model.close()


STEPS = ("lend", "protect", "ask", "review", "keep", "search", "undo")


def demonstrate(folder: Path, after: Callable[[str, Demonstration], None] = lambda _name, _demonstration: None) -> None:
    """Run the steps and print what they say; `after` is called after each."""
    demonstration = Demonstration(folder)
    try:
        for number, name in enumerate(STEPS, 1):
            step = getattr(demonstration, name)
            print(f"\n{number}. {step.__doc__}", flush=True)
            print("   " + step().replace("\n", "\n   "), flush=True)
            after(name, demonstration)
    finally:
        demonstration.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="work here and leave everything in place, instead of a new folder")
    folder = parser.parse_args().folder
    if shutil.which("git") is None:
        print("this needs the program `git`", file=sys.stderr)
        return 1
    if folder is not None:
        demonstrate(folder.resolve())
        return 0
    with tempfile.TemporaryDirectory(prefix="farhand-demonstration-", ignore_cleanup_errors=True) as made:
        demonstrate(Path(made).resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
