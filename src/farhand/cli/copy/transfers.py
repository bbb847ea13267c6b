"""Start a transfer between remote endpoints and follow it, across restarts of the gateway."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from farhand.cli.client import Answer, Client, ClientError, ConnectionLost, NoGateway
from farhand.cli.copy.endpoints import Progress
from farhand.cli.output import remark

POLL_SECONDS = (0.02, 0.5)
# How long the gateway may be away: as long as the gateway waits for an endpoint of a transfer.
PATIENCE_SECONDS = 60.0


def transfer(client: Client, source: str, destination: str, agent: str | None, show: Progress) -> dict[str, Any]:
    """Copy between two remote endpoints and return the record of the transfer. Raises ClientError."""
    body = {"source": source, "destination": destination, "agent_id": agent, "background": True}
    # Every attempt has the same key: a gateway that restarts in between starts the transfer once.
    headers = {"Idempotency-Key": secrets.token_hex(16)}
    # A gateway that just restarted answers `not_found` for nodes that have not reconnected yet.
    started = _retry(lambda: client.post("/v1/transfers", body, headers=headers), passing=("not_found",))
    return follow(client, str(started.value["id"]), show)


def _retry(ask: Callable[[], Answer], patience: float = PATIENCE_SECONDS, passing: tuple[str, ...] = ()) -> Answer:
    """Return the answer, waiting for a gateway that is away for a while. Raises ClientError.

    Once the gateway was away, errors with a code in `passing` are retried too.
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
                    remark("the gateway does not answer; the transfer continues when it is back")
            elif until is None or error.code not in passing:
                raise
            if now >= until:
                raise
        time.sleep(POLL_SECONDS[1])


def follow(client: Client, transfer_id: str, show: Progress, patience: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """Return the record of a transfer once it succeeds. Ctrl-C cancels it. Raises ClientError."""
    path = f"/v1/transfers/{transfer_id}"
    pause = POLL_SECONDS[0]
    continues = f"transfer {transfer_id} continues when the gateway is back; see `farhand log --kind transfer`"
    try:
        while (record := _retry(lambda: client.get(path), patience).value)["state"] == "running":
            show(record["bytesTransferred"], record["bytes_total"])
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS[1])
    except KeyboardInterrupt:
        try:
            fate = f"the transfer is {client.delete(path).value['state']}"
        except (NoGateway, ConnectionLost) as error:
            fate = f"{error}; {continues}"
        raise ClientError("interrupted", f"interrupted; {fate}") from None
    except (NoGateway, ConnectionLost) as error:
        raise ClientError(error.code, f"{error}; {continues}") from None
    if record["state"] != "ok":
        raise ClientError(record["error"]["kind"], record["error"]["message"])
    show(record["bytesTransferred"], record["bytes_total"])
    return dict(record)
