"""A release: built by its script, signed, and started without Node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from farhand import __version__
from tests.support.harness import ROOT

BUILT = "farhand/console/static/index.html"
# A small environment: the packages of this one take minutes to list.
CLIENTS = Path(sys.prefix) / "clients" / "bin" / "python"


def verify(folder: Path, allowed: Path) -> int:
    """Check a download as docs/how-to/install.md says."""
    command = ["ssh-keygen", "-Y", "verify", "-f", allowed, "-I", "release@farhand", "-n", "farhand-release"]
    with (folder / "SHA256SUMS").open("rb") as sums:
        signed = subprocess.run(
            [*command, "-s", folder / "SHA256SUMS.sig"], stdin=sums, capture_output=True, check=False
        )
    summed = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder, capture_output=True, check=False)
    return signed.returncode or summed.returncode


def test_a_release_is_complete_signed_and_starts_without_node(tmp_path: Path) -> None:
    key, out = tmp_path / "key", tmp_path / "out"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    command = [sys.executable, "scripts/release.py", "--out", out, "--key", key, "--environment", CLIENTS]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stderr
    names = {path.name for path in out.iterdir()}
    wheel, sdist = f"farhand-{__version__}-py3-none-any.whl", f"farhand-{__version__}.tar.gz"
    bills = {f"farhand-{__version__}.cdx.json", f"farhand-console-{__version__}.cdx.json"}
    assert names == {wheel, sdist, "SHA256SUMS", "SHA256SUMS.sig", *bills}
    listed = {one["name"] for bill in bills for one in json.loads((out / bill).read_text())["components"]}
    assert {"openai-agents", "svelte", "marked"} <= listed

    with zipfile.ZipFile(out / wheel) as archive:
        inside = archive.namelist()
    with tarfile.open(out / sdist) as archive:
        packed = [name.partition("/")[2] for name in archive.getnames()]
    assert BUILT in inside and f"src/{BUILT}" in packed and "hatch_build.py" in packed
    assert not [name for name in [*inside, *packed] if "node_modules" in name or name.startswith("tests")]

    allowed = tmp_path / "allowed"
    allowed.write_text(f"release@farhand {(tmp_path / 'key.pub').read_text()}")
    assert verify(out, allowed) == 0
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 1 and "is not empty" in again.stderr

    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, out / wheel]
    subprocess.run(pip, env={**os.environ, "PATH": "/nonexistent"}, check=True, timeout=120)
    shown = subprocess.run(
        [sys.executable, "-m", "farhand", "--version"],
        env={**os.environ, "PATH": "/nonexistent", "PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert __version__ in shown.stdout and (target / BUILT).is_file()

    with (out / sdist).open("ab") as file:
        file.write(b"x")
    assert verify(out, allowed) != 0
