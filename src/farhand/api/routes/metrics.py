"""`GET /metrics`: metrics of the gateway in the Prometheus text format."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from farhand import __version__
from farhand.api.server.http import Reply, Request
from farhand.api.server.router import route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import Gate
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.store.group_commit import GroupCommit
from farhand.store.tables.metrics import Durations, count_rows

TEXT: Final = "text/plain"
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
# Durations of calls, in milliseconds: up to 2**21, about 35 minutes.
CALL_BUCKETS: Final = range(22)
# Durations of disk syncs, in microseconds: up to 2**24, about 17 seconds.
SYNC_BUCKETS: Final = range(4, 25)
STATES: Final = {
    "runs": "Runs of the agent that have not ended, by state.",
    "outbox": "Messages on their way to people, by state.",
    "transfers": "Transfers that have not ended, by state.",
    "cron_slots": "Slots of scheduled jobs on record, by status.",
    "cron_jobs": "Scheduled jobs.",
}


class MetricsRoutes:
    def __init__(self, database: GroupCommit, node_registry: NodeRegistry, gate: Gate, replica: str = "") -> None:
        """`replica`: the id of this gateway among those that serve together."""
        self._replica = replica
        self._database = database
        self._node_registry = node_registry
        self._gate = gate
        self._started = time.time()

    @route("GET /metrics", Scope.READ, "Figures of this gateway for Prometheus.", media=(TEXT,))
    async def metrics(self, _request: Request) -> Reply:
        rows = await self._database.read(count_rows)
        own = [*_calls(self._gate), *_nodes(self._node_registry), *_store(self._database), *_process(self._started)]
        # What is counted in the store is the same for all gateways that share it.
        lines = [*_labelled(own, self._replica), *_rows(rows)]
        return Reply("\n".join([*lines, ""]).encode(), content_type=CONTENT_TYPE)


def _labelled(lines: list[str], replica: str) -> Iterator[str]:
    """Yield the figures of one gateway of a fleet with its id."""
    label = f'replica="{_escaped(replica)}"'
    for line in lines:
        name, _, rest = line.partition(" ")
        if not replica or name == "#":
            yield line
        elif "{" in line:
            yield line.replace("{", f"{{{label},", 1)
        else:
            yield f"{name}{{{label}}} {rest}"


def _calls(gate: Gate) -> Iterator[str]:
    ended = gate.durations
    yield from _metric("farhand_info", "gauge", "The version of the gateway.", 1, version=__version__)
    yield from _about("farhand_calls_total", "counter", "Calls that have ended, by route and final state.")
    for (family, state), durations in sorted(ended.items()):
        yield _line("farhand_calls_total", sum(durations.counts), family=family, state=state)
    yield from _about("farhand_call_duration_seconds", "histogram", "How long calls took.")
    for (family, state), durations in sorted(ended.items()):
        yield from _histogram(
            "farhand_call_duration_seconds", durations, CALL_BUCKETS, 1000, family=family, state=state
        )
    yield from _metric("farhand_calls_open", "gauge", "Calls that have not ended.", gate.open_count)
    yield from _metric("farhand_frozen", "gauge", "Whether everything is frozen.", int(gate.frozen is not None))


def _nodes(node_registry: NodeRegistry) -> Iterator[str]:
    nodes = sorted(node_registry.nodes.items())
    online = sum(node.online for _, node in nodes)
    yield from _metric("farhand_nodes", "gauge", "Machines that joined, connected or not.", online, state="online")
    yield _line("farhand_nodes", len(nodes) - online, state="offline")
    yield from _about("farhand_node_online", "gauge", "Whether a machine is connected.")
    for node_id, node in nodes:
        yield _line("farhand_node_online", int(node.online), node=node_id)
    yield from _about("farhand_node_calls_open", "gauge", "Calls that are open on a machine.")
    for node_id, node in nodes:
        yield _line("farhand_node_calls_open", node.running, node=node_id)


def _store(database: GroupCommit) -> Iterator[str]:
    yield from _metric("farhand_store_commits_total", "counter", "Transactions of the store.", database.commits)
    yield from _about("farhand_store_sync_seconds", "histogram", "Durable commits; one serves many writes.")
    yield from _histogram("farhand_store_sync_seconds", database.commit_times, SYNC_BUCKETS, 1_000_000)
    yield from _metric(
        "farhand_store_waiting", "gauge", "Writes that are not committed yet.", database.waiting, what="writes"
    )
    yield from _metric("farhand_store_healthy", "gauge", "Whether the store can be written.", int(database.healthy))
    yield from _about("farhand_store_bytes", "gauge", "Size of the store and of its log.")
    for what, path in database.files.items():
        yield _line("farhand_store_bytes", path.stat().st_size if path.exists() else 0, what=what)


def _rows(rows: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield from _metric("farhand_sessions", "gauge", "Conversations on record.", rows["sessions"][""])
    for name, text in STATES.items():
        yield from _about(f"farhand_{name}", "gauge", text)
        for state, count in sorted(rows[name].items()):
            yield _line(f"farhand_{name}", count, state=state)


def _process(started: float) -> Iterator[str]:
    """Yield process metrics under the names of the standard client libraries."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield from _metric(
        "process_cpu_seconds_total",
        "counter",
        "Processor time of the gateway.",
        round(usage.ru_utime + usage.ru_stime, 3),
    )
    yield from _metric("process_start_time_seconds", "gauge", "When the gateway was started.", round(started, 3))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names are enough)
    except OSError:
        return  # a system without /proc
    yield from _metric(
        "process_resident_memory_bytes", "gauge", "Memory of the gateway.", pages * os.sysconf("SC_PAGE_SIZE")
    )
    yield from _metric("process_open_fds", "gauge", "Open descriptors of the gateway.", descriptors)


def _about(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _metric(name: str, kind: str, text: str, value: float, **labels: str) -> Iterator[str]:
    """Yield a metric with one value."""
    yield from _about(name, kind, text)
    yield _line(name, value, **labels)


def _line(name: str, value: float, **labels: str) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escaped(text: str) -> str:
    return str(text).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _histogram(name: str, durations: Durations, buckets: range, units: int, **labels: str) -> Iterator[str]:
    counts = list(durations.counts)
    for index in buckets:
        bound = 2**index / units
        yield _line(f"{name}_bucket", sum(counts[: index + 1]), **labels, le=f"{bound:g}")
    yield _line(f"{name}_bucket", sum(counts), **labels, le="+Inf")
    yield _line(f"{name}_sum", round(durations.total / units, 6), **labels)
    yield _line(f"{name}_count", sum(counts), **labels)
