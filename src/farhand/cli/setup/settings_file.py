"""Change `farhand.toml` and keep everything else in it, comments included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farhand import config
from farhand.cli.client import ClientError
from farhand.machine.files.private_files import replace_private

# Settings by section and key; the section may have dots, as in `providers.office`.
Changes = Mapping[tuple[str, str], Any]


def changed_text(home: Path, changes: Changes) -> str:
    """Return the settings file of a home with changes. Raises ClientError if it is not valid, before or after."""
    import tomlkit  # noqa: PLC0415 - the command line starts without it
    import tomlkit.exceptions  # noqa: PLC0415

    path = home / config.FILE
    try:
        document = tomlkit.parse(path.read_text() if path.exists() else "")
        for (section, key), value in changes.items():
            table: Any = document
            for name in section.split("."):
                if name not in table:
                    # Without a table of its own, `[providers]` would stand empty above `[providers.office]`.
                    table[name] = tomlkit.table(is_super_table=name != section.rpartition(".")[2])
                table = table[name]
            table[key] = value
    except (tomlkit.exceptions.TOMLKitError, UnicodeDecodeError) as error:
        raise ClientError("failed", f"{path} is not valid TOML: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ClientError("failed", f"{path} cannot be changed: {error}") from None
    text = tomlkit.dumps(document)
    try:
        config.parse(text, path)
    except config.SettingsError as error:
        raise ClientError("failed", str(error)) from None
    return text


def write_settings(home: Path, text: str) -> Path:
    """Replace the settings file; it may contain keys, so only its owner can read it."""
    path = home / config.FILE
    replace_private(path, text.encode())
    return path
