"""Build what a release consists of: python scripts/release.py [--out DIR] [--key FILE] [--environment PYTHON]

Writes into DIR (default: dist): the sdist and the wheel, both with the built console; the bills of materials of the
Python packages and of the console (CycloneDX); SHA256SUMS; and with --key, SHA256SUMS.sig, made with `ssh-keygen -Y`.

The wheel is installed into a new environment without Node, where it has to start; the packages of that environment are
the bill. --environment names an interpreter whose packages are listed instead, and leaves that installation out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSOLE = "farhand/console/static/index.html"
# What a signature is for; `ssh-keygen -Y verify` has to be given the same.
PURPOSE = "farhand-release"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--key", type=Path, help="private SSH key that signs the checksums")
    parser.add_argument("--environment", type=Path, metavar="PYTHON", help="list the packages of this interpreter")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        print(f"release: {out} is not empty; remove it or choose another folder with --out", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    wheel = build(out)
    bills(out, wheel, options.environment)
    sums = out / "SHA256SUMS"
    sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in sorted(out.iterdir()) if path != sums))
    if options.key:
        run("ssh-keygen", "-q", "-Y", "sign", "-f", options.key, "-n", PURPOSE, sums)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.name}")
    return 0


def build(out: Path) -> Path:
    """Build the sdist, and the wheel from the sdist; return the wheel."""
    environment = {**os.environ, "FARHAND_REQUIRE_CONSOLE": "1"}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, env=environment)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        if CONSOLE not in archive.namelist():
            raise SystemExit(f"release: {wheel.name} does not contain {CONSOLE}")
    return wheel


def bills(out: Path, wheel: Path, python: Path | None) -> None:
    """Write the bills of materials."""
    version = wheel.name.split("-")[1]
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--of", "JSON", "-o"]
    command += [str(out / f"farhand-{version}.cdx.json")]
    if python is not None:
        run(*command, python)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(sys.executable, "-m", "venv", folder)
            installed = Path(folder) / "bin" / "python"
            without_node = {**os.environ, "PATH": "/nonexistent"}
            run(installed, "-m", "pip", "install", "--quiet", wheel, env=without_node)
            run(Path(folder) / "bin" / "farhand", "--version", env=without_node)
            run(*command, installed)
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("release: npm is needed for the console's bill of materials; install Node")
    bill = run(npm, "sbom", "--sbom-format=cyclonedx", "--package-lock-only", cwd=ROOT / "console")
    (out / f"farhand-console-{version}.cdx.json").write_text(bill)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises SystemExit with what it said if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"release: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
