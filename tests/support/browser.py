"""Debian's Chromium with the console, for the tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand import console
from tests.support.harness import GatewayProcess

CHROMIUM = Path("/usr/bin/chromium")
# Parts of the browser's own window that are pages, which take as much time as a page of the console does; then the
# features that Playwright switches off, since only the last flag of this name counts.
WITHOUT = (
    *("InitialWebUI", "WebUIReloadButton", "WebUIToolbar", "PreloadTopChromeWebUI", "SpareRendererForSitePerProcess"),
    *("PreloadTopChromeWebUILessNavigations", "WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "WebUIOmniboxFullPopup"),
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades", "LensOverlay"),
    *("HttpsFirstBalancedModeAutoEnable", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning"),
    *("AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled"),
    "PreconnectToSearch",
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(WITHOUT)}",
]
# To end a test that hangs: on a busy machine a page, or the index of the site's search, takes more than half a minute.
PATIENCE_MS = 90_000
BUILT = Path(console.__file__).parent / "static"
HOSTILE = "<img src=x onerror=window.hit=1>"


class Visit:
    """One person's browser, with all that it complained about and every origin it spoke to."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints: list[str] = []
        self.origins: set[str] = set()
        self.refused: list[str] = []
        self.page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("dialog", lambda dialog: (self._note(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("response", lambda answer: answer.status >= 400 and self.refused.append(answer.url))
        self.page.on("request", lambda request: self._requested(request.url))

    def _note(self, text: str) -> None:
        self.complaints.append(text)

    def _requested(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.origins.add("/".join(url.split("/")[:3]))

    def sign_in(self, gateway: GatewayProcess, screen: str = "") -> Any:
        """The page, signed in and live, at a screen such as `calls/ID`."""
        self.page.goto(gateway.url + gateway.request("POST", "/v1/signin", {}).json()["path"])
        self.seen(self.page.locator("#line"), "Live")
        if screen:
            self.go(screen)
        return self.page

    def go(self, screen: str) -> None:
        self.page.evaluate("(screen) => { location.hash = '#/' + screen; }", screen)

    def seen(self, element: Any, text: str | re.Pattern[str] = "") -> None:
        from playwright.sync_api import expect

        expect(element).to_be_visible(timeout=PATIENCE_MS)
        expect(element).to_contain_text(text, timeout=PATIENCE_MS)

    def gone(self, element: Any) -> None:
        from playwright.sync_api import expect

        expect(element).to_have_count(0, timeout=PATIENCE_MS)

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip("no browser: scripts/install-test-servers installs Debian's chromium")
    if not (BUILT / "index.html").exists():
        pytest.skip("the console was not built: run `make test`, or `pip install -e .`")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: it is in the extra `dev`")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Opens browsers; at the end, none may have reported an error or contacted a server other than its gateway."""
    visits: list[Visit] = []

    def open_one(**options: Any) -> Visit:
        visits.append(Visit(browser, **options))
        return visits[-1]

    yield open_one
    for one in visits:
        one.context.close()
    complaints = [text for one in visits for text in one.complaints]
    assert not complaints, (complaints, [one.refused for one in visits])
    assert all(len(one.origins) == 1 for one in visits), [one.origins for one in visits]
