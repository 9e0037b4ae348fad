"""A headless Chromium of the system, where there is one, with pages opened from disk."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Generator[Any]:
    """A browser; the test is skipped where playwright or Chromium is not installed."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        # A container's root has no user namespaces for a sandbox; the pages are our own.
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, file: Path) -> Generator[Any]:
    """A page that is drawn whole, without network; whatever it complains of fails the test."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    yield page
    context.close()
    assert complaints == []


def rows_of(page: Any, table: str) -> dict[str, list[str]]:
    """The values of a table's cells by its rows' first, from all of its pages."""
    found: dict[str, list[str]] = {}
    while True:
        values = "rows => rows.map(row => [...row.cells].map(cell => cell.dataset.value))"
        found |= {first: rest for first, *rest in page.locator(f"#{table} tbody tr").evaluate_all(values)}
        following = page.locator(f".table:has(#{table}) .pager button", has_text="Next")
        if following.count() == 0 or following.is_disabled():
            return found
        following.click()


def column(page: Any, table: str, number: int) -> list[float]:
    """The numbers of a column, of the rows that are shown."""
    values = f"rows => rows.map(row => Number(row.cells[{number}].dataset.value))"
    return page.locator(f"#{table} tbody tr").evaluate_all(values)


def pointed_at(page: Any, chart_id: str, lane: int, part: float) -> str:
    """The tooltip's text for the bar of a lane at a share of the time, in a chart of two lanes."""
    chart = page.locator(f"#{chart_id}")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    height = (box["height"] - 8 - 54 - 2) / 2
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    page.mouse.move(box["x"] + 119 + (box["width"] - 118 - 16 - 2) * part, box["y"] + 9 + (lane + 0.5) * height)
    tip = page.locator(f"#{chart_id} .tip strong")
    tip.wait_for()
    return tip.inner_text()
