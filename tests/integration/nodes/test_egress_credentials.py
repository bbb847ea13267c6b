"""A credential that the egress proxy adds: requests to its host carry it, and no command can read it."""

from __future__ import annotations

import datetime
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.integration.cli.conftest import Command
from tests.integration.nodes.test_lent_folder_shell import LEVELS
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

pytestmark = pytest.mark.usefixtures("own_interpreters")

VALUE = "credential-value-4711"


def certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


class Service:
    """An https server that notes the headers of requests and says how many it had."""

    def __init__(self, folder: Path, host: str = "localhost") -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.certificate, key = certificate(folder, host)
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                service.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                said = b"served %d" % len(service.requests)
                self.send_response(200)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Service:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path) as running:
        yield running


FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


@pytest.mark.parametrize("level", LEVELS)
def test_a_request_carries_what_no_command_can_read(
    shared_gateway: GatewayProcess, tmp_path: Path, service: Service, level: str
) -> None:
    root, name, host = tmp_path / "root", f"egress-{level}", f"localhost:{service.port}"
    root.mkdir()
    (root / "fetch.py").write_text(FETCH)
    url = f"https://{host}"
    options = ["--root", str(root), "--sandbox", level, "--network", f"allow:{host}"]
    trusting: dict[str, str | None] = {"SSL_CERT_FILE": str(service.certificate)}
    # The proxy is for names; programs would not use it for the loopback address of their own.
    proxied = "unset no_proxy NO_PROXY; "
    with NodeProcess(shared_gateway, tmp_path / "node", name, *options, env=trusting) as node:
        put = {"value": VALUE, "nodes": [name], "hosts": [host], "header": "X-Api-Key: key {}"}
        answer = shared_gateway.request("PUT", "/v1/secrets/SERVICE", put)
        assert answer.status == 200 and answer.json()["hosts"] == [host], answer
        fetched = node.ok("Bash", {"command": f"{proxied}curl -sS -H 'x-api-key: mine' {url}/curl 2>&1"})
        assert fetched["output"] == "served 1", fetched
        posted = node.ok("Bash", {"command": f"{proxied}curl -sS -d body=1 {url}/post 2>&1"})
        assert posted["output"] == "served 2", posted
        python = node.ok("Bash", {"command": f"{proxied}/usr/bin/python3 fetch.py {url}/python 2>&1"})
        assert python["output"].strip() == "served 3", python
        for path, headers, body in service.requests:
            assert headers["x-api-key"] == f"key {VALUE}" and headers["host"] == host, (path, headers)
            assert body == (b"body=1" if path == "/post" else b"")
        # Neither in the environment, nor in a process, nor in a file that a command can read.
        search = (
            f"{proxied}curl -sS {url}/again >/dev/null; "
            "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; "
            "cat $(dirname $SSL_CERT_FILE)/* 2>/dev/null; "
            f"grep -rl '{VALUE[:10]}''{VALUE[10:]}' . /run /tmp /etc $(dirname $SSL_CERT_FILE) 2>/dev/null; true"
        )
        found = node.ok("Bash", {"command": search})["output"]
        assert VALUE not in found.replace(f"{VALUE[:10]}''{VALUE[10:]}", ""), "the search itself is the only trace"
        assert "PRIVATE KEY" not in found
        smuggled = node.ok(
            "Bash", {"command": f"{proxied}curl -sS -o /dev/null -w '%{{http_code}}' -X TRACE {url}/ 2>&1"}
        )
        assert smuggled["output"] == "400", smuggled
        refused = node.fails("Bash", {"command": "echo {{secret:SERVICE}}"}, "not_allowed")
        assert "only added to requests" in refused
        # The node forgets it when it stops, and gets it again.
        node.restart()
        count = len(service.requests)
        again = {"command": f"{proxied}curl -sS {url}/restarted 2>&1"}
        wait_until(lambda: carries(node, again, service, count), 30, "the credential after a restart")
        assert shared_gateway.request("DELETE", "/v1/secrets/SERVICE").status == 200
        node.ok("Bash", {"command": f"{proxied}curl -sSk {url}/removed 2>&1"})
        assert "x-api-key" not in service.requests[-1][1]
    traces = (tmp_path / "node" / "state").rglob("*")
    assert not [path for path in traces if path.is_file() and VALUE.encode() in path.read_bytes()]


def carries(node: NodeProcess, command: dict[str, str], service: Service, count: int) -> bool:
    node.ok("Bash", command)
    return any("x-api-key" in headers for _, headers, _ in service.requests[count:])


def test_a_server_with_another_certificate_gets_nothing(
    shared_gateway: GatewayProcess, tmp_path: Path, service: Service
) -> None:
    root, host = tmp_path / "root", f"localhost:{service.port}"
    root.mkdir()
    with NodeProcess(
        shared_gateway, tmp_path / "node", "strict", "--root", str(root), "--network", f"allow:{host}"
    ) as node:
        put = {"value": VALUE, "nodes": ["strict"], "hosts": [host]}
        assert shared_gateway.request("PUT", "/v1/secrets/STRICT", put).status == 200
        answer = node.ok("Bash", {"command": f"unset no_proxy NO_PROXY; curl -sSk https://{host}/ 2>&1"})
        assert answer["exitCode"] != 0 and "502" in answer["output"], answer
        assert service.requests == []
        assert shared_gateway.request("DELETE", "/v1/secrets/STRICT").status == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"hosts": ["https://x"]}, "is not a host"),
        ({"hosts": ["x.example"], "header": "Authorization Bearer"}, "must be like"),
        ({"hosts": ["x.example"], "header": "Host: {}"}, "cannot carry"),
        ({"hosts": ["x.example"], "header": "X: {}\r\nY: 1"}, "cannot carry"),
        ({"hosts": ["x.example"], "tools": ["ci__Bash"]}, "cannot be restricted to tools"),
        ({"header": "X: {}"}, "needs the hosts"),
        ({"hosts": ["x.example"], "value": "two\nlines"}, "without line breaks"),
    ],
)
def test_an_invalid_credential_is_refused(shared_gateway: GatewayProcess, body: Any, said: str) -> None:
    answer = shared_gateway.request("PUT", "/v1/secrets/BAD", {"value": VALUE, **body})
    assert answer.status == 400 and said in json.dumps(answer.json()), answer


def test_a_node_without_a_proxy_is_named(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(shared_gateway, tmp_path / "node", "proxyless"):
        done = Command(shared_gateway.home)(
            "secret", "set", "NONE", "--node", "proxyless", "--host", "x.example", stdin=VALUE
        )
        assert done.status != 0 and "has no egress proxy" in done.err, done
