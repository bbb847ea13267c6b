"""The documentation site: it builds without warnings, its links lead somewhere, and it needs no other server."""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from farhand.cli.main import COMMANDS
from tests.support.browser import Visit
from tests.support.harness import ROOT, GatewayProcess


class Parsed(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in {"script", "img", "iframe"} and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") not in {"prev", "next", "canonical"}:
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("documentation") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", built],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parsed]:
    return {page: Parsed(page) for page in site.rglob("*.html")}


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Parsed]) -> None:
    wrong = []
    for page, parsed in pages.items():
        if page.name == "404.html":
            continue
        for link in {*parsed.links, *parsed.loaded}:
            address = urlsplit(link)
            if address.scheme:
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(address.fragment)
            known = pages[target].anchors if target in pages else {anchor}
            if not target.exists() or (anchor and anchor not in known):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert sorted(wrong) == []


def test_nothing_is_loaded_from_another_server(site: Path, pages: dict[Path, Parsed]) -> None:
    assert {url for parsed in pages.values() for url in parsed.loaded if "//" in url} == set()
    styles = [style.read_text() for style in site.rglob("*.css")]
    assert not any("url(http" in style or "@import" in style for style in styles)


def test_the_reference_has_every_command_route_and_name_of_the_sdk(site: Path, pages: dict[Path, Parsed]) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert [name for name in COMMANDS if f">farhand {name}<" not in commands] == []
    described = json.loads((site / "assets" / "openapi.json").read_text())
    routes = html.unescape((site / "reference" / "http-routes.html").read_text())
    wanted = [f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods]
    assert len(wanted) > 50
    assert [route for route in wanted if f">{route}<" not in routes] == []
    sdk = pages[site / "reference" / "sdk-api.html"].anchors
    assert {"farhand.sdk.ToolRegistry.tool", "farhand.sdk.NodeClient.run", "farhand.sdk.ToolContext.progress"} <= sdk


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served as any static server does."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_a_route_can_be_tried_from_its_page_and_the_search_finds_it(browser: Any, address: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(f'[gateway]\norigins = ["{address}"]\n')
    with GatewayProcess(home) as gateway:
        visit = Visit(browser)
        page = visit.page
        page.goto(f"{address}/reference/http-routes.html", wait_until="domcontentloaded", timeout=120_000)
        page.locator("#try-it-settings").get_by_label("Gateway").fill(gateway.url)
        page.locator("#try-it-settings").get_by_label("Token").fill(gateway.token)

        read = page.locator('.try-it[data-operation*=\'"path": "/v1/calls/{call_id}", "param\']').first
        read.get_by_text("Try it").click()
        read.get_by_label("call_id").fill("no/such call")
        read.get_by_role("button").click()
        visit.seen(read.locator("pre"), "404")
        visit.seen(read.locator("pre"), "not_found")

        call = page.locator('.try-it[data-operation*=\'"path": "/v1/tools/invoke"\']')
        call.get_by_text("Try it").click()
        call.get_by_label("Body").fill('{"tool": "gsv__ConfigGet", "args": {"path": "x"}}')
        call.get_by_role("button").click()
        visit.seen(call.locator("pre"), '"ok": true')

        box = page.get_by_role("textbox", name="Search")
        box.click()
        visit.seen(page.locator(".md-search-result__meta"), "Type to start searching")
        box.press_sequentially("freeze")  # the search listens to keys, which `fill` does not press
        visit.seen(page.locator(".md-search-result__item").first, "reeze")
        assert visit.origins == {address, gateway.url}
        visit.context.close()
