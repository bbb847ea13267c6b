"""Whether everything is stopped, and by whose order.

In memory for a plug-in. On disk for whatever must stay stopped when its program is killed: a node, and the gateway.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from farhand.protocol.freezing import FreezeOrder

FREEZE_FILE = "freeze.json"
"""Where a gateway keeps it in its home, and a node in its folder there."""


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the file says."""

    order: FreezeOrder | None = None
    thawed_at: int | None = None


class Brake:
    """While there is an order, nothing may begin."""

    def __init__(self) -> None:
        self.order: FreezeOrder | None = None
        self.thawed_at: int | None = None
        """When an order was last lifted."""

    def freeze(self, order: FreezeOrder) -> None:
        """Holds at once. Raises OSError when it could not be kept, and holds all the same."""
        self.order = order
        self._keep()

    def thaw(self, at: int) -> None:
        """Raises OSError when it could not be kept; then the order stands."""
        before = (self.order, self.thawed_at)
        self.order, self.thawed_at = None, at
        try:
            self._keep()
        except OSError:
            self.order, self.thawed_at = before
            raise

    def keep_freezing(self, order: FreezeOrder) -> str | None:
        """As `freeze`; what is to be told when it could not be kept."""
        try:
            self.freeze(order)
        except OSError as error:
            return f"the freeze holds, but could not be kept on disk, so a restart lifts it: {error}"
        return None

    def release(self, gateway_id: str, at: int) -> str | None:
        """As `thaw`, for a gateway that wants it; what is to be told when it may not, or could not."""
        order = self.order
        if order is None:
            return None
        if order.gateway_id not in ("", gateway_id):
            return f"another gateway ({order.gateway_id}) froze this node, and only that one lifts it"
        try:
            self.thaw(at)
        except OSError as error:
            return f"the thaw could not be kept on disk, so the freeze stands: {error}"
        return None

    def _keep(self) -> None:
        """In memory there is nothing to do."""


class FileBrake(Brake):
    """Survives whatever happens to the program. A file that cannot be read holds as an order would."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=Kept)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            at = int(path.stat().st_mtime * 1000) if path.exists() else 0
            kept = Kept(FreezeOrder(at, "farhand", f"{path} cannot be read: {error}"))
        self.order, self.thawed_at = kept.order, kept.thawed_at

    def _keep(self) -> None:
        beside = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(Kept(self.order, self.thawed_at)))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
