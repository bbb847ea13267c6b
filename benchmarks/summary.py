"""The page docs/reference/performance.md, from the results of `make bench`.

    .venv/bin/python -m benchmarks.summary RESULTS.json [--write]

Prints the table of figures; `--write` puts it, the details and the chart into the documentation. Every row is a figure,
what it is compared with in the same run, their ratio, and the benchmark that repeats it.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "reference" / "performance.md"
CHART = REPOSITORY / "docs" / "assets" / "performance.svg"
Report = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure. `times` says how many times better than the peer it is: for a chart, always above 1 when better."""

    what: str
    figure: str
    peer: str = ""
    ratio: str = ""
    benchmark: str = ""
    times: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.summary", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="a file of benchmarks/results/, as `make bench` writes it")
    parser.add_argument("--write", action="store_true", help="update the page and its chart")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    rows = list(summary(results["reports"]))
    table = as_markdown(rows)
    if arguments.write:
        replace_block("figures", f"{results_line(results)}\n\n{table}")
        replace_block("details", details(results["reports"]))
        CHART.write_text(chart(rows))
    print(table)
    return 0


def summary(reports: Report) -> Iterator[Row]:
    """Yield the rows whose benchmark was run, in the order of the page."""
    for name, rows in SECTIONS.items():
        if name in reports:
            yield from rows(reports[name])


def first_call(report: Report) -> Iterator[Row]:
    yield Row("fresh clone to the first command (`make run`)", f"{report['call_s']:.0f} s", benchmark="first_call")


def prompt(report: Report) -> Iterator[Row]:
    times = report["times"]
    ours, theirs = times["farhand run NODE -- true"]["p50"], times.get("ssh localhost true", {}).get("p50")
    yield beside("`farhand run NODE -- true`, p50", ours, "ms", "`ssh localhost true`", theirs, "prompt", 0)
    ours, theirs = times["key echo, farhand run --tty"], times.get("key echo, ssh -tt", {})
    for part in ("p50", "p99"):
        yield beside(f"echo of a key, {part}", ours[part], "ms", "`ssh -tt`", theirs.get(part), "prompt", 1)
    yield Row("`farhand --help`, p50", f"{times['farhand --help']['p50']:.0f} ms", benchmark="prompt")


def jobs(report: Report) -> Iterator[Row]:
    spawns = report["spawns"]
    yield beside(
        "`Bash` `true`: durable, output kept, p50", spawns["Bash"]["p50_ms"], "ms", "bare spawn of the same shell",
        spawns["bare"]["p50_ms"], "jobs", 1,
    )  # fmt: skip


def search(report: Report) -> Iterator[Row]:
    rows = {row["title"]: row for row in report["rows"]}
    for title, peer in (("Grep, few matches", "`rg`"), ("Glob **/*", "`rg --files` and stat")):
        row = rows[title]
        name = title.replace("**/*", "`**/*`")
        yield beside(f"{name}, {report['files']:,} files", row["tool_ms"], "ms", peer, row["rg_ms"], "search", 0)


def transfer(report: Report) -> Iterator[Row]:
    rates = {
        name: median(s["mib_per_second"] for s in samples) for name, samples in report["samples"].items() if samples
    }
    ours = rates["farhand"]
    for name, peer in (("scp", "`scp`"), ("raw", "bare sockets")):
        if name in rates:
            yield beside(
                f"{report['mib'] // 1024} GiB from machine to machine", ours, "MiB/s", peer, rates[name], "transfer", 0,
                more_is_better=True,
            )  # fmt: skip
    samples = report["samples"]["farhand"]
    busy, idle = (median(sample[f"{when}_p99_ms"] for sample in samples) for when in ("busy", "idle"))
    yield beside("a small call during that transfer, p99", busy, "ms", "without a transfer", idle, "transfer", 1)


def turn(report: Report) -> Iterator[Row]:
    yield Row(
        "added to the model's own time by a turn with one tool call, p50",
        f"{report['added']['p50']:.0f} ms",
        benchmark="turn",
    )


def context(report: Report) -> Iterator[Row]:
    tokens = report["tokens"]
    sizes = " / ".join(tokens)
    yield Row(
        f"prompt of a bare “hello” with {sizes} machines",
        " / ".join(f"{n:,}" for n in tokens.values()) + " tokens",
        benchmark="context",
    )


def recovery(report: Report) -> Iterator[Row]:
    yield Row(
        "gateway killed, to the first answer of a machine, p50",
        f"{report['p50_s']:.2f} s",
        "",
        f"slowest {report['worst_s']:.2f} s",
        "recovery",
    )


def freeze(report: Report) -> Iterator[Row]:
    figures = report["figures"]
    yield Row(
        f"freeze of {report['nodes']} machines, all confirmed, p50",
        f"{figures['median_s']:.2f} s",
        "",
        f"slowest {figures['worst_s']:.2f} s",
        "freeze",
    )


def page(report: Report) -> Iterator[Row]:
    yield Row(
        "console, first visit", f"{report['kilobytes']:.0f} KB, live after {report['seconds']:.1f} s", benchmark="page"
    )


def footprint(report: Report) -> Iterator[Row]:
    figures, peer = report["figures"], (report["openclaw"] or {}).get("theirs", {})
    yield beside(
        "gateway, start to ready", figures["ready_wall_s"], "s", "OpenClaw", peer.get("ready_wall_s"), "footprint", 2
    )
    yield beside(
        "gateway, idle, resident",
        figures["gateway_rss_mb"],
        "MB",
        "OpenClaw",
        peer.get("gateway_rss_mb"),
        "footprint",
        0,
    )
    yield Row("`farhand node`, idle, resident", f"{figures['node_rss_mb']:.0f} MB", benchmark="footprint")


PEERS = {
    "mcp_plain": "MCP Python SDK, default options",
    "mcp": "MCP Python SDK, its fastest mode",
    "mcp_ts": "MCP TypeScript SDK",
    "openclaw": "OpenClaw, its smallest tool",
}


def relay(report: Report) -> Iterator[Row]:
    found = {(row["target"], row["callers"]): row for row in report["figures"]}
    for target, title in (("farhand", "durable calls"), ("farhand_look", "read-only calls")):
        for name, peer in PEERS.items():
            if target == "farhand_look" and name != "mcp_plain":
                continue
            if (name, 64) in found:
                yield beside(
                    f"{title}, 64 callers", found[target, 64]["calls_per_second"], "calls/s", peer,
                    found[name, 64]["calls_per_second"], "relay", 0, more_is_better=True,
                )  # fmt: skip
    yield beside(
        "one durable call, one caller, p50", found["farhand", 1]["p50_us"] / 1000, "ms",
        "bare sockets that write to disk", found["floor_kept", 1]["p50_us"] / 1000, "relay", 2,
    )  # fmt: skip


def fleet(report: Report) -> Iterator[Row]:
    rates = {name: report[f"calls_per_second_{name}"] for name in ("sqlite", "one", "three")}
    yield beside(
        "fleet: durable calls, 64 callers, one gateway",
        rates["one"],
        "calls/s",
        "one gateway on SQLite",
        rates["sqlite"],
        "fleet",
        0,
        more_is_better=True,
    )
    yield beside(
        "fleet: the same on three gateways",
        rates["three"],
        "calls/s",
        "on one",
        rates["one"],
        "fleet",
        0,
        more_is_better=True,
    )
    yield beside(
        "fleet: one caller, p50",
        report["one_caller_ms_own"],
        "ms",
        "on SQLite",
        report["one_caller_ms_sqlite"],
        "fleet",
        1,
    )
    yield Row(
        "fleet: extra for a machine on another gateway", f"{report['other_gateway_extra_ms']:.1f} ms", benchmark="fleet"
    )
    if "kill_to_answer_p95_s" in report:
        yield Row(
            "fleet: gateway killed, to the first answer elsewhere, p95",
            f"{report['kill_to_answer_p95_s']:.1f} s",
            benchmark="fleet",
        )


SECTIONS: dict[str, Callable[[Report], Iterator[Row]]] = {
    "first_call": first_call,
    "prompt": prompt,
    "jobs": jobs,
    "search": search,
    "transfer": transfer,
    "turn": turn,
    "context": context,
    "recovery": recovery,
    "freeze": freeze,
    "page": page,
    "footprint": footprint,
    "relay": relay,
    "fleet": fleet,
}


def beside(
    what: str, ours: float, unit: str, peer: str, theirs: float | None, benchmark: str, digits: int,
    *, more_is_better: bool = False,
) -> Row:  # fmt: skip
    """Return a row that compares a figure with its peer's; without one, the figure alone."""
    if theirs is None:
        return Row(what, f"{ours:,.{digits}f} {unit}", benchmark=benchmark)
    times = ours / theirs if more_is_better else theirs / ours
    ratio = f"{ours / theirs:.2f}" if ours / theirs < 9.95 else f"{ours / theirs:,.0f}"
    return Row(what, f"{ours:,.{digits}f} {unit}", f"{peer}: {theirs:,.{digits}f} {unit}", ratio, benchmark, times)


def as_markdown(rows: list[Row]) -> str:
    lines = ["| | Farhand | beside it, in the same run | ratio | repeat |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {row.figure} | {row.peer} | {row.ratio} | `{row.benchmark}` |" for row in rows]
    return "\n".join(lines)


def results_line(results: Report) -> str:
    machine = ", ".join(
        f"{name} {value}" for name, value in results["versions"].items() if "not installed" not in value
    )
    return f"Measured {results['date']}: {machine}."


def details(reports: Report) -> str:
    """The tables that have more columns than the summary."""
    parts = []
    if "relay" in reports:
        parts.append(relay_details(reports["relay"]))
    if "growth" in reports:
        parts.append(growth_details(reports["growth"]))
    if "memory" in reports:
        parts.append(memory_details(reports["memory"]))
    if "search" in reports:
        parts.append(search_details(reports["search"]))
    return "\n\n".join(parts)


def relay_details(report: Report) -> str:
    machine = report["machine"]
    lines = [
        "### A tool call: HTTP → gateway → node → back",
        "",
        f"Medians of {report['rounds']} rounds of {report['seconds']} s, in turns; one sync of the disk took "
        f"{machine['fdatasync_us']:.0f} µs; other programs used {machine['other_cpu_median']:.2f} cores.",
        "",
        "| | callers | calls/s | p50 ms | p99 ms | CPU µs per call |",
        "|---|---|---|---|---|---|",
    ]
    for target, title in report["targets"].items():
        rows = [row for row in report["figures"] if row["target"] == target]
        shown = [
            " / ".join(str(row["callers"]) for row in rows),
            " / ".join(f"{row['calls_per_second']:,.0f}" for row in rows),
            " / ".join(f"{row['p50_us'] / 1000:.2f}" for row in rows),
            " / ".join(f"{row['p99_us'] / 1000:.1f}" for row in rows),
            " / ".join(" + ".join(f"{each:.0f}" for each in row["cpu_us_per_call"]) for row in rows),
        ]
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines)


def growth_details(report: Report) -> str:
    nodes = report["nodes"]
    last = nodes["rows"][-1]
    return "\n".join(
        [
            "### Growth",
            "",
            "Gateway CPU per call at 16 callers.",
            "",
            "| | CPU µs per call |",
            "|---|---|",
            f"| {slashed(nodes['rows'], 'nodes')} nodes connected | {slashed(nodes['rows'], 'cpu_us')} |",
            f"| {slashed(report['calls'], 'calls')} calls in the record | {slashed(report['calls'], 'cpu_us')} |",
            "",
            f"A connected node takes {last['kb_per_node']:.0f} KB. With {last['nodes']} nodes and "
            f"{nodes['sessions']:,} idle sessions the gateway takes {nodes['rss_mb']:.0f} MB, and answers "
            f"`GET /healthz` within {nodes['lag_p99_ms']:.1f} ms at p99 while 64 callers call.",
        ]
    )


def slashed(rows: list[dict[str, float]], name: str) -> str:
    return " / ".join(f"{row[name]:,.0f}" for row in rows)


def search_details(report: Report) -> str:
    lines = [
        f"### Search, {report['files']:,} files",
        "",
        f"| | tool | {report['rg'].split(' (')[0]} | ratio |",
        "|---|---|---|---|",
    ]
    for row in report["rows"]:
        title = row["title"].replace("*", r"\*")
        lines.append(f"| {title} | {row['tool_ms']:.0f} ms | {row['rg_ms']:.0f} ms | {row['ratio']:.2f} |")
    return "\n".join(lines)


def memory_details(report: Report) -> str:
    lines = ["### Memory search", "", "| index | chunks | p50 ms | p95 ms | CPU ms |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(row["kind"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["kind"] == kind]
        shown = [" / ".join(f"{row[name]:.1f}" for row in rows) for name in ("p50_ms", "p95_ms", "cpu_ms")]
        lines.append(f"| {kind} | {slashed(rows, 'chunks')} | {' | '.join(shown)} |")
    return "\n".join(lines)


def replace_block(name: str, text: str) -> None:
    page = PAGE.read_text()
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE} has no block {start} … {end}")
    PAGE.write_text(f"{before}{start}\n{text}\n{end}{after}")


def chart(rows: list[Row]) -> str:
    """Draw how many times better or worse than its peer each figure is, on a logarithmic scale."""
    shown = [row for row in rows if row.times is not None]
    width, label, bar, line = 900, 470, 330, 24
    reach = max(abs(math.log10(row.times or 1)) for row in shown)
    middle = label + bar / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {line * len(shown) + 40}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>How many times better or worse than what it is compared with</title>",
        "<style>text{fill:#333}.axis{stroke:#999}.better{fill:#2a7f62}.worse{fill:#b5562b}"
        "@media (prefers-color-scheme: dark){text{fill:#ddd}.better{fill:#4fb38f}.worse{fill:#d98a5f}}</style>",
        f'<text x="{middle - 8}" y="16" text-anchor="end">worse</text><text x="{middle + 8}" y="16">better</text>',
    ]
    for number, row in enumerate(shown):
        times = row.times or 1
        length = abs(math.log10(times)) / reach * (bar / 2 - 4)
        top = 28 + number * line
        kind, left = ("better", middle) if times >= 1 else ("worse", middle - length)
        title = f"{row.what} / {row.peer.partition(':')[0]}".replace("`", "")
        parts += [
            f'<text x="{label - 10}" y="{top + 13}" text-anchor="end" font-size="11.5">{escape(title)}</text>',
            f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{max(length, 1):.1f}" height="16" rx="2"/>',
        ]
        value = f"{times:.1f} ×" if times >= 1 else f"1/{1 / times:.1f}"
        place = middle + length + 6 if times >= 1 else middle + 6
        parts.append(f'<text x="{place:.1f}" y="{top + 13}">{value}</text>')
    bottom = 28 + len(shown) * line
    parts += [f'<line class="axis" x1="{middle}" x2="{middle}" y1="22" y2="{bottom}"/>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
