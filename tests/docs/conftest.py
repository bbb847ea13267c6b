from __future__ import annotations

from tests.support.browser import browser

__all__ = ["browser"]
