"""How programs write their log."""

from __future__ import annotations

import logging

from farhand.cli.run.runtime import MaskedFormatter


def test_a_record_is_one_line_and_steers_no_terminal() -> None:
    formatter = MaskedFormatter("%(levelname)s %(message)s")
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "said %s", "args": ("a\nERROR b\r\x1b[2J\x9b\x7f\tü",)})
    assert formatter.format(record) == "INFO said a\\nERROR b\\r\\x1b[2J\\x9b\\x7f\tü"


def test_what_went_wrong_keeps_its_lines() -> None:
    try:
        raise ValueError("first\nsecond\x1b")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)})
    shown = MaskedFormatter("%(message)s").format(record)
    assert shown.startswith("failed\nTraceback") and "second\\x1b" in shown
