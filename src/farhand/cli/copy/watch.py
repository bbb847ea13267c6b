"""Watches a transfer that goes on in the gateway, also while the gateway is restarted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from farhand.cli.client import Answer, Client, ClientError, ConnectionLost, NoGateway
from farhand.cli.copy.progress import Progress
from farhand.cli.output import remark

POLL_SECONDS = (0.02, 0.5)
# How long a gateway may be away; as long as an end of a transfer may.
PATIENCE_SECONDS = 60.0
AWAY = "the gateway does not answer; the transfer goes on there when it is back"


def begin(client: Client, body: dict[str, Any]) -> str:
    """The id of a transfer that now goes on in the gateway. Raises ClientError."""
    # The same key with every try: a gateway that was stopped just then begins it once.
    key = {"Idempotency-Key": secrets.token_hex(16)}
    # A gateway that is just back refuses what is for nodes that are not back yet.
    begun = asked(lambda: client.request("POST", "/v1/transfers", body, headers=key), passing=("not_found",))
    return str(begun.value["id"])


def asked(ask: Callable[[], Answer], patience: float = PATIENCE_SECONDS, passing: tuple[str, ...] = ()) -> Answer:
    """The answer, also of a gateway that is away for a while, which is said. Raises ClientError.

    Refusals with a code in `passing` are waited out once the gateway was away.
    """
    until = None
    while True:
        try:
            return ask()
        except ClientError as error:
            now = time.monotonic()
            if isinstance(error, NoGateway | ConnectionLost):
                if until is None:
                    until = now + patience
                    remark(AWAY)
            elif until is None or error.code not in passing:
                raise
            if now >= until:
                raise
        time.sleep(POLL_SECONDS[1])


def follow(client: Client, transfer_id: str, show: Progress, patience: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """The record of a transfer that ended well. Ctrl-C cancels it. Raises ClientError."""
    path = f"/v1/transfers/{transfer_id}"
    pause = POLL_SECONDS[0]
    try:
        while (record := asked(lambda: client.get(path), patience).value)["state"] == "running":
            show(record["bytesTransferred"], record["bytes_total"])
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS[1])
    except KeyboardInterrupt:
        raise ClientError("interrupted", f"interrupted; {_cancelled(client, transfer_id)}") from None
    except (NoGateway, ConnectionLost) as error:
        raise ClientError(error.code, f"{error}. {_going_on(transfer_id)}") from None
    if record["state"] != "ok":
        raise ClientError(record["error"]["kind"], record["error"]["message"])
    show(record["bytesTransferred"], record["bytes_total"])
    return dict(record)


def _cancelled(client: Client, transfer_id: str) -> str:
    try:
        ended = client.request("DELETE", f"/v1/transfers/{transfer_id}").value
    except (NoGateway, ConnectionLost) as error:
        return f"{error}. {_going_on(transfer_id)}"
    return f"the transfer is {ended['state']}"


def _going_on(transfer_id: str) -> str:
    return (
        f"The transfer {transfer_id} goes on when the gateway is back; `farhand log --kind transfer` shows how it ended"
    )
