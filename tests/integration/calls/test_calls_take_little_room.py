"""Refused calls take little room, whatever they hold, and the record of calls does not grow for ever."""

from __future__ import annotations

from pathlib import Path

from tests.support.harness import GatewayProcess, wait_until

MB = 1024 * 1024


def test_refused_calls_do_not_fill_the_disk(gateway: GatewayProcess) -> None:
    """S16: six denied calls of 8 MB each took 100 MB."""

    def stored() -> int:
        return sum(file.stat().st_size for file in gateway.home.glob("farhand.db*"))

    narrow = gateway.request("POST", "/v1/tokens", {"scopes": ["tools.write"]}).json()["token"]
    before = stored()
    for _ in range(6):
        body = {"tool": "exec", "args": {"command": "x" * (8 * MB)}}
        answer = gateway.request("POST", "/v1/tools/invoke", body, token=narrow)
        assert answer.json()["state"] == "denied", answer
    assert stored() - before < MB


def test_the_record_of_calls_is_kept_within_its_limit(tmp_path: Path) -> None:
    """S16: there was no retention for calls. A gateway that knows no such limit passes over the variable."""
    with GatewayProcess(tmp_path / "home", env={"FARHAND_RETENTION_HISTORY_MB": "1"}) as gateway:
        args = {"path": ".", "content": "x" * 200_000}
        made = [gateway.invoke("write", args)["request_id"] for _ in range(40)]
        for _ in range(150):
            gateway.invoke("write", {"path": ".", "content": "x"})
        wait_until(lambda: gateway.request("GET", f"/v1/calls/{made[0]}").status == 404, what="the oldest call to go")
        newest = gateway.get("/v1/calls?limit=1")["calls"]
        assert newest and newest[0]["id"] != made[0]
