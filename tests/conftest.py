from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.fleet_servers import nats, postgres  # noqa: F401
from tests.support.harness import GatewayProcess, free_port, wait_until

# Property tests: fewer examples than by default in `make test`, many in `make siege`.
EXAMPLES = 1000 if os.environ.get("FARHAND_SIEGE") == "long" else 50
settings.register_profile("farhand", deadline=None, max_examples=EXAMPLES)  # a busy machine is no reason to fail
settings.load_profile("farhand")
# Shells start background commands with SIGINT ignored; the processes of the tests would inherit that and miss Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start thousands of gateways and nodes. Without byte code each of them compiles the whole package first,
# which takes longer than the rest of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A command whose environment differs from this one in such a variable is not forked (tests/support/fork_server.py).
os.environ.pop("PYTHONUNBUFFERED", None)
os.environ.setdefault("FARHAND_TEST_FORK", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two for each CPU: a test waits for its processes as long as it computes."""
    return 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest tests, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("siege") is None)


def pytest_collection_finish() -> None:
    """What exists now stays: many tests collect garbage, and need not go through all modules and tests for it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway of the test's own, with `SA_NODE_TOKEN` set and no node."""
    with GatewayProcess(tmp_path / "home") as process:
        yield process


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for all tests of a module that do not stop it."""
    with GatewayProcess(tmp_path_factory.mktemp("gateway") / "home") as process:
        yield process


@pytest.fixture(scope="module")
def own_interpreters() -> Iterator[None]:
    """For modules that read the environment or the arguments of processes in /proc: no process is forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARHAND_TEST_FORK", "0")
        yield


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A bucket of a real S3-speaking server, and the server's address."""
    log = tmp_path_factory.mktemp("s3") / "log"
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:

        def made() -> bool:
            assert server.poll() is None, log.read_text(errors="replace")[-2000:]
            try:
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=5).close()
            except OSError:
                return False
            return True

        wait_until(made, 60, "the S3 server")
        yield "s3://bucket", endpoint
    finally:
        server.kill()
        server.wait()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """List the tests that failed in the file FARHAND_FAILED_TESTS, if that is set, one in each line."""
    path = os.environ.get("FARHAND_FAILED_TESTS")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a") as file:
            file.write(report.nodeid + "\n")
