"""Client libraries are extras: named when they are missing, and loaded only if a channel needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from farhand.channels.registry import LIBRARIES, ChannelError, make_channels

LOADED = """
import sys
import farhand.app.gateway, farhand.cli
from farhand.channels.registry import make_channels
make_channels({"telegram": {"token": "1:x"}, "discord": {"token": "x"}}, {})
print([name for name in sys.argv[1:] if name in sys.modules])
"""


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_channel_without_its_library_names_the_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[kind], None)
    with pytest.raises(ChannelError) as refused:
        make_channels({"mine": {"kind": kind}}, {})
    assert str(refused.value) == f"[channels.mine] needs the extra: pip install 'farhand[{kind}]'"


def test_channels_without_a_library_work_without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, module, None)
    tables = {"signal": {"number": "+15550000000"}, "crm": {"kind": "webhook", "secret": "s"}}
    assert set(make_channels(tables, {})) == {"console", "signal", "crm"}


def test_no_library_is_loaded_before_its_channel_runs() -> None:
    names = [*LIBRARIES.values(), "httpx", "httpx2", "aiohttp", "websockets"]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *names], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
