"""A real browser for tests of the page: Chromium, if it and its driver are installed, driven by Selenium."""

import base64
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PHONE = (390, 844)
LAPTOP = (1280, 900)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser, for the length of a block; skips the test where there is none."""
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium or its driver is not installed")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        yield page
    finally:
        page.quit()


def look(page: Any, url: str, size: tuple[int, int] = LAPTOP, dark: bool = False) -> None:
    """Open an address as on a screen of that size, in light or dark."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    page.get(url)


def picture(page: Any, name: str) -> None:
    """Keep a picture of the whole page where TELEGRAD_SCREENSHOTS says, if it says so."""
    folder = os.environ.get("TELEGRAD_SCREENSHOTS")
    if folder:
        size = page.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 2400), "scale": 1}
        shot = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def text(page: Any, element: str) -> str:
    """The text of an element, by its id."""
    return str(page.execute_script("return document.getElementById(arguments[0]).innerText", element))


def count(page: Any, selector: str) -> int:
    """How many elements there are of a kind."""
    return int(page.execute_script("return document.querySelectorAll(arguments[0]).length", selector))


def check(page: Any) -> None:
    """Nothing is wider than the window, and the browser has found no fault."""
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth + 1")
    faults = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert not faults
