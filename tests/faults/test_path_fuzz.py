"""Random paths through random links, against a slow oracle: nothing outside the roots is read, changed or allowed.

The oracle resolves a path by rewriting its text, one link at a time and each time from the beginning, and where the
path exists it must agree with the kernel. What tools read must be the content of an allowed file, and whatever they
write, the protected and outside folders stay byte for byte as they were.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farhand.machine.files.allowed_paths import MOST_LINKS
from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.listing import list_folder
from farhand.machine.search.glob import glob_files
from farhand.protocol.errors import InvalidArgs, NotAllowed, ToolError

pytestmark = pytest.mark.siege

LONG = os.environ.get("FARHAND_SIEGE") == "long"
CASES = 110_000 if LONG else 150

# "é" in one character and in two.
COMPOSED, DECOMPOSED = "\u00e9", "e\u0301"
FOLDERS = ("work", "work/deep", "work/deep/er", "more", "outside", "outside/deep", "home", "home/agents/main")
FILES = (
    "work/note",
    "work/deep/note",
    "work/deep/er/note",
    f"work/{COMPOSED}",
    "work/note.",
    "more/note",
    "outside/note",
    "outside/deep/note",
    f"outside/{DECOMPOSED}",
    "outside/linked",
    "home/token",
    "home/farhand.db",
    "home/agents/main/note",
)
LINKS = ("l0", "l1", "l2", "l3")
WRITTEN = b"written by the test"

ODD = (
    ".",
    "..",
    "...",
    " ",
    "note.",
    "note ",
    "token.",
    "NOTE",
    "Work",
    "HOME",
    "~",
    "%2e%2e",
    "..%2f",
    "\\..",
    "a\\..\\b",
)
PLAIN = ("work", "deep", "er", "more", "outside", "home", "agents", "main", "note", "token", "linked", "hard", "new")
names = st.sampled_from([*PLAIN, *LINKS, *LINKS, ".", "..", *ODD, COMPOSED, DECOMPOSED, "x" * 300])
slashes = st.sampled_from(["/", "/", "/", "//", "/./", "///"])
# `{top}` is the folder of the case.
TOPS = ("{top}/", "{top}/", "/{top}/", "//{top}/", "/.{top}/", "/..{top}/", "{top}/work/../", "../", "./../")
KERNEL = (
    "/proc/self/root{top}/",
    "/proc/self/root/",
    "/proc/self/cwd/",
    "/proc/1/root{top}/",
    "/proc/self/fd/0",
    "/proc/thread-self/root{top}/",
    "//proc/self/root{top}/",
    "/dev/fd/",
    "/dev/stdin",
    "/etc/",
    "//etc/",
    "/",
)


@st.composite
def paths(draw: Any) -> str:
    """Half of them lead to a file that exists, spelled oddly; the others are made of any parts."""
    if draw(st.booleans()):
        top = draw(st.sampled_from(TOPS))
        parts = draw(st.sampled_from([*FILES, "work/hard", "work/new"])).split("/")
        if draw(st.booleans()):
            top, parts = "", parts[1:]  # from the workspace
        through = draw(st.sampled_from([None, None, *LINKS]))
        if through is not None:
            parts = [*parts[: draw(st.integers(0, len(parts)))], through, *parts[1:]]
    else:
        top = draw(st.sampled_from(["", "", "./", *TOPS, *KERNEL]))
        parts = draw(st.lists(names, max_size=6))
    text = top + "".join(part + draw(slashes) for part in parts)
    return text if draw(st.integers(0, 9)) == 0 else text.rstrip("/")


links = st.dictionaries(
    st.tuples(st.sampled_from(("work", "work", *FOLDERS)), st.sampled_from(LINKS)), paths(), max_size=4
)


class Tree:
    """A workspace and a further root, a protected home with an exposed folder, and an outside."""

    def __init__(self, top: Path, linked: dict[tuple[str, str], str], *, everything: bool) -> None:
        """`everything`: the whole machine is allowed but for what is protected."""
        self.top = str(top)
        for folder in FOLDERS:
            (top / folder).mkdir(parents=True)
        for name in FILES:
            (top / name).write_bytes(name.encode())
        (top / "work" / "hard").hardlink_to(top / "outside" / "linked")
        for (folder, name), target in linked.items():
            text = target.replace("{top}", self.top)
            if text and "\0" not in text:
                os.symlink(text, top / folder / name)
        self.roots = ["/"] if everything else [f"{top}/work", f"{top}/more", f"{top}/home/agents/main"]
        self.before = self.closed()

    def files(self, *, upward: bool) -> Files:
        return Files(
            f"{self.top}/work",
            roots=[ConfinedRoot(root) for root in self.roots],
            hidden=[f"{self.top}/home", "/proc", "/etc"],
            exposed=[f"{self.top}/home/agents"],
            upward=upward,
        )

    def closed(self) -> dict[str, tuple[int, bytes]]:
        """Everything in the folders that no tool may change."""
        found = {}
        for start in ("outside", "home"):
            for folder, folders, files in os.walk(f"{self.top}/{start}"):
                if folder.startswith(f"{self.top}/home/agents"):
                    continue
                for name in (*folders, *files):
                    path = f"{folder}/{name}"
                    mode = os.lstat(path).st_mode
                    kind = stat.S_IFMT(mode)
                    data = os.readlink(path).encode("utf-8", "surrogateescape") if stat.S_ISLNK(mode) else b""
                    found[path] = (kind, Path(path).read_bytes() if stat.S_ISREG(mode) else data)
        return found

    def allows(self, real: str) -> bool:
        """The rule, in words: in a root, and not in the home unless among its agents."""
        inside = any(f"{real}/".startswith(f"{root.rstrip('/')}/") for root in self.roots)
        return inside and not self.protects(real)

    def protects(self, real: str) -> bool:
        hidden = any(f"{real}/".startswith(f"{folder}/") for folder in (f"{self.top}/home", "/proc", "/etc"))
        return hidden and not f"{real}/".startswith(f"{self.top}/home/agents/")

    def expected(self, path: str, *, upward: bool) -> tuple[str, str]:
        """What the check must say: "allowed", "refused" or "error", and the real path."""
        parts = path.replace("\\", "/").replace("%2f", "/").replace("%2e", ".").split("/")
        if not upward and ".." in parts:
            return "refused", ""
        text = path if path.startswith("/") else f"{self.top}/work/{path}"
        text = without_dots(text)
        if self.protects(text):
            return "refused", ""
        for _ in range(MOST_LINKS + 1):
            following = one_link_less(text)
            if following is None:
                real = without_dots(text)
                return ("allowed" if self.allows(real) else "refused"), real
            link, text = following
            if link.startswith("/proc/") or self.protects(link):
                return "refused", ""
        return "error", ""


def without_dots(text: str) -> str:
    done: list[str] = []
    for part in text.split("/"):
        if part == "..":
            done = done[:-1]
        elif part not in ("", "."):
            done.append(part)
    return "/" + "/".join(done)


def one_link_less(text: str) -> tuple[str, str] | None:
    """The first link in a path, and the path with the link's target in its place; None for a path without links."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    for count in range(1, len(parts) + 1):
        link = without_dots("/".join(parts[:count]))
        if parts[count - 1] != ".." and is_link(link):
            target = "" if link.startswith("/proc/") else os.readlink(link)
            above = "" if target.startswith("/") else link.rpartition("/")[0]
            return link, "/".join([above, target, *parts[count:]])
    return None


def is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


def kernels(path: str) -> str | None:
    """Where the kernel itself gets to, if the path exists."""
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def judged(files: Files, path: str) -> tuple[str, str]:
    try:
        return "allowed", files.place(path).real
    except NotAllowed:
        return "refused", ""
    except (ToolError, InvalidArgs):
        return "error", ""


def read(files: Files, path: str) -> bytes | None:
    try:
        with files.open(path) as file:
            content: bytes = file.read()
            return content
    except ToolError:
        return None


def act(files: Files, deed: str, path: str) -> None:
    """Change something, or fail to."""
    try:
        if deed == "write":
            files.write(path, WRITTEN)
        elif deed == "create":
            files.create(path, WRITTEN)
        elif deed == "update":
            files.update(path, WRITTEN)
        elif deed == "append":
            files.append(path, WRITTEN)
        elif deed == "remove":
            files.remove(path)
    except ToolError:
        pass


def seen(files: Files, path: str) -> Iterator[str]:
    try:
        for entry in list_folder(files, path, hidden=True):
            yield f"{files.place(path).real}/{entry.name}"
        yield from glob_files(files, "**/*", path)
    except ToolError:
        return


counted: Counter[str] = Counter()


@settings(
    max_examples=CASES,
    derandomize=not LONG,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    linked=links,
    path=paths(),
    deed=st.sampled_from(["write", "create", "update", "append", "remove"]),
    upward=st.booleans(),
    everything=st.sampled_from([False, False, True]),
)
def check_case(linked: dict[tuple[str, str], str], path: str, deed: str, upward: bool, everything: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # where a sync costs nothing
        top = Path(folder) / "top"
        tree = Tree(top, linked, everything=everything)
        wanted = path.replace("{top}", tree.top)
        files = tree.files(upward=upward)

        expected, real = tree.expected(wanted, upward=upward)
        if len(wanted) < 4000:
            assert judged(files, wanted) == (expected, real if expected == "allowed" else "")
        counted[expected] += 1
        if expected == "allowed" and (kernel := kernels(real)) is not None:
            assert kernel == real

        content = read(files, wanted)
        if content is not None:
            counted["read"] += 1
            assert expected == "allowed"
            name = content.decode()
            hard = real == f"{tree.top}/work/hard"  # a second name of a file outside: the same file
            assert name == "outside/linked" if hard else real == f"{tree.top}/{name}"
            assert not tree.protects(real)
        if everything:
            return  # a path may lead anywhere on this machine: nothing is written
        for found in seen(files, wanted):
            assert not tree.protects(found), found

        act(files, deed, wanted)
        assert tree.closed() == tree.before
        if deed == "append" and real == f"{tree.top}/work/hard" and expected == "allowed":
            counted["appended through a hard link"] += 1
            assert Path(real).read_bytes() == b"outside/linked" + WRITTEN


def test_the_path_check_agrees_with_a_slow_oracle() -> None:
    counted.clear()
    check_case()
    tried = counted["allowed"] + counted["refused"] + counted["error"]
    print(f"paths against the oracle: {tried} tried, {tried} held; {dict(counted)}")
    assert tried >= CASES * 0.9
    assert counted["allowed"] > CASES / 50 and counted["refused"] > CASES / 50 and counted["read"]
