"""Secret handles: values that callers name as `{{secret:NAME}}`, and that only the machine of the call gets.

Values are stored encrypted. The key is in the system's keyring, in the variable FARHAND_SECRETS_KEY, or in a file of
the home folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from farhand.machine.files.private_files import replace_private
from farhand.protocol.egress import EgressCredential, check_header
from farhand.protocol.errors import FarhandError, InvalidArgs, NotAllowed, NotFound
from farhand.protocol.key_auth import KEY_BYTES, from_text, to_text
from farhand.protocol.redaction import KnownSecrets, can_be_masked
from farhand.protocol.sealing import seal
from farhand.protocol.secret_handles import MARK, NAME, names_in, substituted
from farhand.store.ports import Store
from farhand.store.tables.access.secrets import SecretRecord, all_secrets, put_secret, remove_secret, secret_used

KEY_FILE: Final = "secrets.key"
KEY_VARIABLE: Final = "FARHAND_SECRETS_KEY"
MOST_BYTES: Final = 65_536
MOST_SECRETS: Final = 1000
DEFAULT_HEADER: Final = "Authorization: Bearer {}"
_HOST: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?")
_SERVICE: Final = "farhand"


class Secrets:
    """The secrets of a gateway. `load` before use."""

    def __init__(
        self,
        database: Store,
        clock: Callable[[], int],
        known: KnownSecrets,
        key: Callable[[], bytes],
    ) -> None:
        """`known` masks the values wherever something leaves the gateway. `key` is called when it is needed."""
        self._database = database
        self._clock = clock
        self._known = known
        self._key = key
        self._records: dict[str, SecretRecord] = {}
        # Grows with each change.
        self.version = 0

    def load(self, records: Sequence[SecretRecord]) -> None:
        """Load the stored secrets. Raises FarhandError if they were encrypted with another key."""
        self._records = {record.name: record for record in records}
        for record in records:
            self._known.add(self._decrypted(record))

    async def refresh(self) -> None:
        """Read the secrets again: another gateway of the fleet has set or removed one."""
        self.load(await self._database.read(all_secrets))

    async def all(self) -> list[SecretRecord]:
        return await self._database.read(all_secrets)

    async def put(
        self,
        name: str,
        value: str,
        nodes: Sequence[str],
        tools: Sequence[str],
        by: str,
        *,
        hosts: Sequence[str] = (),
        header: str = "",
    ) -> SecretRecord:
        """Set a secret. With `hosts`, it is only a header of requests to these, which the egress proxies of nodes add.

        Raises ValueError for a name, value or restriction that cannot be used.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"the name {name[:100]!r} must have letters, digits and '_' only, at most 64")
        size = len(value.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MOST_BYTES or "\0" in value:
            raise ValueError(f"the value must have 1 to {MOST_BYTES} bytes and no NUL character, but has {size} bytes")
        for restriction in (*nodes, *tools):
            if not restriction or any(character.isspace() for character in restriction):
                raise ValueError(f"{restriction[:100]!r} is not the name of a node or a tool")
        if name not in self._records and len(self._records) >= MOST_SECRETS:
            raise ValueError(f"there are {MOST_SECRETS} secrets already; remove one first")
        header = _checked_header(value, nodes, tools, hosts, header) if hosts or header else ""
        record = SecretRecord(
            name,
            self._encrypted(value),
            " ".join(nodes),
            " ".join(tools),
            by,
            self._clock(),
            hosts=" ".join(host.lower() for host in hosts),
            header=header,
        )
        self._known.add(value)
        await self._database.write(partial(put_secret, secret=record))
        self._records[name] = record
        self.version += 1
        return record

    def is_masked(self, record: SecretRecord) -> bool:
        """Return whether the value is masked wherever it appears; one that is short or a number is not."""
        return can_be_masked(self._decrypted(record))

    async def remove(self, name: str, by: str) -> bool:
        """Remove a secret; return whether there was one."""
        removed = await self._database.write(partial(remove_secret, name=name, by=by, now=self._clock()))
        self._records.pop(name, None)
        self.version += 1
        return removed

    # -- calls ------------------------------------------------------------------------------------------

    def check(self, args: msgspec.Raw, tool: str, node_id: str | None) -> None:
        """Raise NotFound, NotAllowed or InvalidArgs if arguments hold a handle that this tool may not use."""
        for name in self._names(args):
            self._allowed(name, tool, node_id)

    def sealed(self, call_id: str, args: msgspec.Raw, tool: str, node_id: str, public: str) -> dict[str, str]:
        """Return the secrets of a call, sealed to the key of its node. Raises ToolError."""
        names = self._names(args)
        if names and not public:
            raise InvalidArgs(f"node {node_id!r} cannot receive secrets; the call did not run")
        try:
            found = {name: seal(self._decrypted(self._allowed(name, tool, node_id)), public) for name in names}
        except ValueError as error:
            raise InvalidArgs(f"node {node_id!r} announced a key that cannot be used: {error}") from None
        self._used(names, call_id)
        return found

    def values(self, call_id: str, args: msgspec.Raw, tool: str) -> dict[str, str]:
        """Return the secrets of a call of the gateway's own tools. Raises ToolError."""
        names = self._names(args)
        found = {name: self._decrypted(self._allowed(name, tool, None)) for name in names}
        self._used(names, call_id)
        return found

    @staticmethod
    def _names(args: msgspec.Raw) -> frozenset[str]:
        if MARK not in bytes(args):
            return frozenset()
        return names_in(msgspec.json.decode(args))

    def _allowed(self, name: str, tool: str, node_id: str | None) -> SecretRecord:
        record = self._records.get(name)
        if record is None:
            raise NotFound(f"there is no secret {name!r}; set it with `farhand secret set {name}`")
        if record.hosts:
            raise NotAllowed(
                f"the secret {name!r} is only added to requests to {' and '.join(record.hosts.split())}, by the proxy "
                "of a node; nothing else may use it"
            )
        nodes, tools = record.nodes.split(), record.tools.split()
        if nodes and node_id not in nodes:
            raise NotAllowed(
                f"the secret {name!r} is for {' and '.join(nodes)} only, not for {node_id or 'the gateway'}"
            )
        if tools and not any(fnmatchcase(tool, pattern) for pattern in tools):
            raise NotAllowed(f"the secret {name!r} is for {' and '.join(tools)} only, not for {tool}")
        return record

    def _used(self, names: frozenset[str], call_id: str) -> None:
        if names:
            operation: Callable[[Any], None] = partial(
                secret_used, names=tuple(names), call_id=call_id, now=self._clock()
            )
            self._database.write(operation, durable=False)

    def known(self, values: Iterable[str], server: str | None) -> KnownSecrets:
        """Return what to mask in the result of a gateway tool: the secrets of the call, or all for an MCP server, whose
        settings may name any."""
        return self._known if server else KnownSecrets(values)

    # -- settings ---------------------------------------------------------------------------------------

    def resolved(self, settings: Any, user: str) -> Any:
        """Return a copy of settings with values instead of handles.

        `user` names the part that uses them, as `--tool` of a secret does: `mcp:NAME`, `channel:NAME`, `provider:NAME`.
        Raises NotFound, NotAllowed or InvalidArgs.
        """
        names = names_in(settings)
        found = {name: self._decrypted(self._allowed(name, user, None)) for name in sorted(names)}
        self._used(names, user)
        return substituted(settings, found)

    def stamp(self, settings: Any) -> tuple[tuple[str, bytes], ...]:
        """Return something that changes when a secret that settings name is changed."""
        try:
            names = sorted(names_in(settings))
        except InvalidArgs:  # reported where the settings are used
            return ()
        found = ((name, self._records.get(name)) for name in names)
        return tuple((name, b"" if record is None else record.value) for name, record in found)

    def sealed_setting(self, settings: Any, user: str, node_id: str, public: str) -> dict[str, str]:
        """Return the secrets that settings for a node name, sealed to its key. Raises ToolError."""
        names = names_in(settings)
        if names and not public:
            raise NotAllowed(f"node {node_id!r} cannot receive secrets")
        try:
            found = {name: seal(self._decrypted(self._allowed(name, user, node_id)), public) for name in sorted(names)}
        except ValueError as error:
            raise NotAllowed(f"node {node_id!r} announced a key that cannot be used: {error}") from None
        self._used(names, user)
        return found

    def for_proxy(self, node_id: str, public: str) -> list[EgressCredential]:
        """Return the credentials that the egress proxy of a node adds to requests, sealed to it. Raises ValueError."""
        return [
            EgressCredential(record.name, record.hosts.split(), record.header, seal(self._decrypted(record), public))
            for record in self._records.values()
            if record.hosts and node_id in record.nodes.split()
        ]

    # -- encryption -------------------------------------------------------------------------------------

    def _encrypted(self, value: str) -> bytes:
        from nacl.secret import SecretBox  # noqa: PLC0415 - few gateways have secrets

        return bytes(SecretBox(self._key()).encrypt(value.encode("utf-8", "surrogatepass")))

    def _decrypted(self, record: SecretRecord) -> str:
        from nacl.exceptions import CryptoError  # noqa: PLC0415
        from nacl.secret import SecretBox  # noqa: PLC0415

        try:
            return SecretBox(self._key()).decrypt(record.value).decode("utf-8", "surrogatepass")
        except (CryptoError, ValueError):
            raise FarhandError(
                f"the secret {record.name!r} was encrypted with another key than the present one ({KEY_VARIABLE}, the "
                f"system's keyring or {KEY_FILE}); restore that key, or set the secret again"
            ) from None


def has_secrets_key(home: Path) -> bool:
    """Return whether a home has a key already."""
    if (home / KEY_FILE).exists():
        return True
    keyring = _keyring()
    return keyring is not None and bool(keyring.get_password(_SERVICE, str(home)))


def _checked_header(value: str, nodes: Sequence[str], tools: Sequence[str], hosts: Sequence[str], header: str) -> str:
    """Return the header that carries a secret to its hosts. Raises ValueError."""
    if not hosts:
        raise ValueError("a header needs the hosts whose requests get it")
    if tools:
        raise ValueError(
            "a secret for hosts cannot be restricted to tools: all confined commands of a node use its proxy"
        )
    for host in hosts:
        if not _HOST.fullmatch(host.lower()):
            raise ValueError(
                f"{host[:100]!r} is not a host: use a name such as api.example.com, or api.example.com:8443"
            )
    if not value.isascii() or not value.isprintable():
        raise ValueError("the value of a header must have printable ASCII characters only, without line breaks")
    header = check_header(header or DEFAULT_HEADER)
    if not nodes:
        raise ValueError("a secret for hosts needs the nodes that get it (--node): a node gets it as soon as it joins")
    return header


def secrets_key(home: Path, environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of the secrets; create one in the keyring, or in a file, if there is none. Raises FarhandError."""
    text = environ.get(KEY_VARIABLE, "").strip()
    if text:
        return _read(text, KEY_VARIABLE)
    path = home / KEY_FILE
    if path.exists():
        return _read(path.read_text().strip(), str(path))
    keyring = _keyring()
    if keyring is not None:
        kept = keyring.get_password(_SERVICE, str(home))
        if kept:
            return _read(kept, "the system's keyring")
    key = os.urandom(KEY_BYTES)
    if keyring is not None:
        keyring.set_password(_SERVICE, str(home), to_text(key))
        return key
    replace_private(path, to_text(key).encode())
    return key


def _read(text: str, place: str) -> bytes:
    try:
        key = from_text(text)
        if len(key) != KEY_BYTES:
            raise ValueError(f"it has {len(key)} bytes, not {KEY_BYTES}")
    except ValueError as error:
        raise FarhandError(f"the key of the secrets in {place} cannot be used: {error}") from None
    return key


def _keyring() -> Any:
    """Return the system's keyring if one is installed and usable; None otherwise."""
    try:
        import keyring  # noqa: PLC0415 - an optional part
        from keyring.backends import fail, null  # noqa: PLC0415
    except ImportError:
        return None
    try:
        backend = keyring.get_keyring()
    except Exception:
        return None
    return None if isinstance(backend, fail.Keyring | null.Keyring) or backend.priority < 1 else keyring
