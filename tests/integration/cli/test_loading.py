"""Packages that a start must not load: each would cost time and memory at every start."""

import json
import subprocess
import sys

LOADED_WHEN_WANTED = {
    "httpx2": "the first question to a model",
    "imaplib": "a channel for mail",
    "jsonschema_rs": "the first schema to check",
    "numpy": "a local model",
    "picows": "the first node",
    "telegram": "a channel of that name",
}


def test_the_gateway_loads_what_is_wanted_only_later_later() -> None:
    program = "import farhand.cli.run.serve, sys, json; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in json.loads(output)}
    assert "uvicorn" in loaded
    assert loaded & LOADED_WHEN_WANTED.keys() == set()
