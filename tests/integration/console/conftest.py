from __future__ import annotations

from tests.support.browser import browser, visit

__all__ = ["browser", "visit"]
