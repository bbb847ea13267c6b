"""What Grep and Glob cost beside the ripgrep program itself, on a tree of 50,000 files.

    python -m benchmarks.search [--files N] [--rounds N] [--json]

Each round runs every contender once, so that a slow moment of the machine hits all of them. Shown are the medians,
the median of the rounds' ratios, and the ratio of the best times, which other work on the machine disturbs least.
The limits are Grep at most 1.2 times `rg`, Glob at most 1.5 times `rg --files` plus the stats it needs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import operator
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.search.grep import ripgrep
from farhand.tools.node_files import NodeFileTools

SUFFIXES = ("py", "py", "rs", "ts", "txt", "json", "c", "h", "html", "md")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--files", type=int, default=50_000)
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--json", action="store_true", help="one JSON document")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="farhand-search-") as folder:
        grow(Path(folder), given.files)
        report = compare(folder, given.files, given.rounds)
    print(json.dumps(report, indent=2) if given.json else as_text(report))


def grow(top: Path, count: int) -> None:
    """A tree like a large repository: 25 files a folder, three deep, 1 to 6 KB of words each."""
    chance = random.Random(7)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(4000)]
    folder = top
    for number in range(count):
        if number % 25 == 0:
            place = number // 25
            folder = top / f"area{place % 40}" / f"part{place // 40 % 20}" / f"unit{place // 800}"
            folder.mkdir(parents=True, exist_ok=True)
        lines = [" ".join(chance.choices(words, k=12)) for _ in range(chance.randint(12, 80))]
        if number % 1000 == 0:
            lines.insert(3, f"needle_{number} is here")
        (folder / f"file{number}.{SUFFIXES[number % 10]}").write_text("\n".join(lines) + "\n")


def compare(top: str, count: int, rounds: int) -> dict[str, Any]:
    hidden = ["/var/lib/farhand"]  # as a node hides its own home
    everywhere = NodeFileTools(Files(top, hidden=hidden))
    rooted = NodeFileTools(Files(top, roots=[ConfinedRoot(top)], hidden=hidden))
    greps = {
        "Grep, few matches": r"needle_\d+ is",
        "Grep, no match": "zzzzzzzzzzzz",
        "Grep, more than 100 matches": r"\bab",
    }
    contenders: list[tuple[str, Callable[[], object], Callable[[], object]]] = []
    for title, pattern in greps.items():
        contenders.append((title, lambda p=pattern: everywhere.Grep(pattern=p), lambda p=pattern: rg(p, top)))
    contenders.append(
        (
            "Grep, few matches, --root",
            lambda: rooted.Grep(pattern=r"needle_\d+ is"),
            lambda: rg(r"needle_\d+ is", top),
        )
    )
    for pattern in ("**/*", "**/*.py", "**/*.{md,html}"):
        contenders.append(
            (f"Glob {pattern}", lambda p=pattern: everywhere.Glob(pattern=p), lambda p=pattern: listed(p, top))
        )
    contenders.append(("Glob **/*, --root", lambda: rooted.Glob(pattern="**/*"), lambda: listed("**/*", top)))

    times: dict[str, tuple[list[float], list[float]]] = {title: ([], []) for title, _, _ in contenders}
    for turn in range(rounds + 1):
        for title, tool, program in contenders:
            # Whoever goes second finds the caches warm, so they take turns.
            pair = [(tool, times[title][0]), (program, times[title][1])]
            for run, measured in pair if turn % 2 else reversed(pair):
                began = time.perf_counter()
                run()
                if turn:
                    measured.append(time.perf_counter() - began)
    rows = [
        {
            "title": title,
            "tool_ms": 1000 * statistics.median(tool_times),
            "rg_ms": 1000 * statistics.median(program_times),
            "ratio": statistics.median(map(operator.truediv, tool_times, program_times)),
            "ratio_of_best": min(tool_times) / min(program_times),
        }
        for title, (tool_times, program_times) in times.items()
    ]
    pure = []
    for title, walk in (
        ("Grep, few matches", lambda: searched(greps["Grep, few matches"], top)),
        ("Glob **/*.py", lambda: walked("*.py", top)),
    ):
        began = time.perf_counter()
        walk()
        took = time.perf_counter() - began
        pure.append({"title": title, "python_ms": 1000 * took, "ratio": took / statistics.median(times[title][0])})
    return {"files": count, "rounds": rounds, "rg": version(), "rows": rows, "pure_python": pure}


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['files']} files, {report['rounds']} rounds, {os.cpu_count()} cores, {report['rg']}",
        f"{'':32}{'tool':>10}{'rg':>10}{'ratio':>8}{'of best':>9}",
    ]
    lines += [
        f"{row['title']:32}{row['tool_ms']:7.1f} ms{row['rg_ms']:7.1f} ms{row['ratio']:8.2f}{row['ratio_of_best']:9.2f}"
        for row in report["rows"]
    ]
    lines += [
        f"{row['title'] + ', pure Python':32}{row['python_ms']:7.1f} ms: {row['ratio']:.1f} times as long as the tool"
        for row in report["pure_python"]
    ]
    return "\n".join(lines)


def searched(pattern: str, top: str) -> int:
    """What a tool without ripgrep would do: read every file and try every line."""
    expression = re.compile(pattern.encode())
    found = 0
    for folder, _, names in os.walk(top):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                found += sum(expression.search(line) is not None for line in file)
    return found


def walked(pattern: str, top: str) -> list[str]:
    """The names that fit, newest first, by the standard library alone."""
    places = [
        os.path.join(folder, name) for folder, _, names in os.walk(top) for name in fnmatch.filter(names, pattern)
    ]
    return sorted(places, key=lambda place: -os.stat(place).st_mtime_ns)


def rg(pattern: str, top: str) -> int:
    command = [ripgrep(), "--no-config", "-uu", "--follow", "--no-messages", "-n", "-e", pattern, "--", top]
    return len(subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout)


def listed(pattern: str, top: str) -> list[int]:
    command = [ripgrep(), "--no-config", "-uu", "--files", "--null", "-g", pattern, "--", top]
    names = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    return [os.stat(name).st_mtime_ns for name in names.split(b"\0") if name]


def version() -> str:
    return subprocess.run([ripgrep(), "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]


if __name__ == "__main__":
    main()
