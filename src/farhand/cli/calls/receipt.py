"""`receipt`: export the signed receipt of a call, and verify one without a gateway."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from farhand.cli.client import Client, url_path
from farhand.cli.commands import ClientGroup
from farhand.cli.json_output import group_json_option
from farhand.cli.output import paint, plain, show, show_fields, show_json
from farhand.protocol.errors import FarhandError
from farhand.protocol.receipts import CallStatement, Receipt, check

MOST_BYTES: Final = 256 * 1024 * 1024
_MARKS: Final = {"ok": "ok", "mismatch": "MISMATCH", "absent": "-"}


class _Receipts(ClientGroup):
    """`receipt CALL` exports."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        named = args and re.fullmatch("[0-9a-fA-F-]{4,}", args[0])
        return super().resolve_command(ctx, ["export", *args] if named else args)


@click.group(cls=_Receipts)
@group_json_option
def receipt() -> None:
    """Export signed receipts of calls, and verify them offline.

    \b
    Examples:
      farhand receipt 01a1eb38 -o receipt.json
      farhand receipt key
      farhand receipt verify receipt.json --gateway-key SHA256:…
    """


@receipt.command("export")
@click.argument("call")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write it to a file instead of standard output.")
@click.option("--content", is_flag=True, help="Add the arguments and the result, so that they can be verified too.")
def export(call: str, output: str | None, content: bool, client: Client) -> None:
    """Export the receipt of a call that has ended. `farhand receipt CALL` does the same.

    \b
    Example:
      farhand receipt export 01a1eb38 --content -o receipt.json
    """
    found = client.get(url_path("/v1/calls/{}/receipt", call, content="1" if content else None)).value
    if output is None:
        show_json(found)
        return
    Path(output).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    show({"file": output}, hint=f"wrote {output}; `farhand receipt verify {output}` checks it")


@receipt.command("key")
def key(client: Client) -> None:
    """Print the public key with which the gateway signs, and its fingerprint.

    \b
    Example:
      farhand receipt key
    """
    show(client.get("/v1/receipts/key"), show_fields)


@receipt.command("verify")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--gateway-key", metavar="KEY", help="Expected key or fingerprint of the gateway.")
@click.option("--node-key", metavar="KEY", help="Expected key or fingerprint of the node.")
def verify(file: str, gateway_key: str | None, node_key: str | None, **_: Any) -> None:
    """Verify a receipt without a gateway; `-` reads standard input. The status is 1 if a part does not match.

    Without --gateway-key and --node-key, the keys in the receipt are used, which proves nothing about who made it:
    compare their fingerprints with those of `farhand receipt key` and `farhand node key`.

    \b
    Example:
      farhand receipt verify receipt.json --gateway-key SHA256:…
    """
    name = "standard input" if file == "-" else file
    text = sys.stdin.buffer.read(MOST_BYTES) if file == "-" else _read(Path(file))
    try:
        found = msgspec.json.decode(text, type=Receipt)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise FarhandError(f"{name} is not a receipt: {error}") from None
    pinned = {name: value for name, value in (("gateway", gateway_key), ("node", node_key)) if value is not None}
    findings = check(found, pinned)
    valid = all(finding.verdict != "mismatch" for finding in findings)

    def render(_: Any) -> None:
        for finding in findings:
            mark = paint(_MARKS[finding.verdict], bold=finding.verdict == "mismatch")
            print(f"{mark:9} {plain(finding.part)}: {plain(finding.message)}")
        print(_stated(found.call))
        if valid and gateway_key is None:
            print("valid, if this gateway key is yours: compare it with `farhand receipt key`, or give --gateway-key")
        else:
            print("valid" if valid else "NOT VALID")

    call = msgspec.to_builtins(found.call)
    show(
        {"valid": valid, "call_id": found.call.id, "call": call, "findings": msgspec.to_builtins(findings)},
        render,
    )
    if not valid:
        raise SystemExit(1)


def _stated(call: CallStatement) -> str:
    """Return what the gateway signed about a call, in one line."""
    place = "" if call.node is None else f" on {call.node}"
    behalf = "" if call.on_behalf_of is None else f" on behalf of {call.on_behalf_of}"
    stated = f"{call.tool}{place} by {call.credential}{behalf}, ended as {call.state}, {_utc(call.ended_at)}"
    return plain(f"call {call.id}: {stated}")


def _utc(at: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at / 1000))
    except (OverflowError, ValueError, OSError):  # a receipt may state any number
        return f"{at} ms"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise FarhandError(f"cannot read {path}: {error.strerror}") from None
    if len(text) > MOST_BYTES:
        raise FarhandError(f"{path} is not a receipt: it has more than {MOST_BYTES} bytes")
    return text
