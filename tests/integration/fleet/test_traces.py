"""Traces of OpenTelemetry follow a call through two gateways and a node, to a real collector endpoint."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.fleet_servers import NatsServer, PostgresServer, fleet_environment
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Takes spans as OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    named = {one.key: one.value.string_value for one in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        collector.spans += [(named["service.name"], span) for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, call_id: str) -> list[tuple[str, Any]]:
        """The spans of a trace that has a span of this call."""
        spans = list(self.spans)
        traces = {
            span.trace_id
            for _, span in spans
            if any(one.key == "farhand.call" and one.value.string_value == call_id for one in span.attributes)
        }
        return [(service, span) for service, span in spans if span.trace_id in traces]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


def test_a_call_is_followed_across_gateways_and_its_node(
    tmp_path: Path, postgres: PostgresServer, nats: NatsServer, bucket: tuple[str, str], collector: Collector
) -> None:
    traced: dict[str, str | None] = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    env = fleet_environment(postgres.new_database(), nats, bucket, tmp_path.name) | traced
    with (
        GatewayProcess(tmp_path / "one", env=env) as one,
        GatewayProcess(tmp_path / "two", env=env) as two,
        NodeProcess(one, tmp_path / "hands", "hands", env=traced),
    ):
        two.wait_for_node("hands")
        answer = two.invoke("hands__Bash", {"command": "echo traced"}, headers={"traceparent": PARENT})
        assert answer["ok"]
        call_id = answer["request_id"]
        found = wait_until(lambda: spans if len(spans := collector.of(call_id)) >= 3 else None, 60, "the spans")
        by_name = {span.name: (service, span) for service, span in found}
        assert by_name.keys() == {"call hands__Bash", "relay to node", "run Bash"}
        service, call = by_name["call hands__Bash"]
        assert service == "farhand-gateway" and call.trace_id.hex() == PARENT.split("-")[1]
        assert call.parent_span_id.hex() == PARENT.split("-")[2]
        assert by_name["run Bash"][0] == "farhand-node"
        assert all(by_name[name][1].parent_span_id == call.span_id for name in ("relay to node", "run Bash"))
        failed = two.invoke("hands__Read", {"path": "/nowhere"}, headers={"traceparent": "nonsense"})
        wait_until(lambda: len(collector.of(failed["request_id"])) >= 2, 60, "the spans of a call that fails")
        assert all(span.status.code == 2 for _, span in collector.of(failed["request_id"]) if "relay" not in span.name)


def test_nothing_is_loaded_without_an_endpoint() -> None:
    code = (
        "import sys; from farhand.machine import tracing; tracing.set_up('x', 'y', {'OTEL_SDK_DISABLED': 'true', "
        "'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:1'}); tracing.set_up('x', 'y', {}); "
        "tracing.begin('a', 'b').end('c'); "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
