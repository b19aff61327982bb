"""The lessons in a real JupyterLab, in a real browser: run all cells, use every widget as a person would.

Skipped where no Chromium is found: playwright's own download of one is not available everywhere.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab on a free port, serving a copy of the notebooks; yields its address."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", home / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data"),
                   "IPYTHONDIR": str(home / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
                   "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    log = open(home / "lab.log", "w")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ServerApp.port_retries=0",
         "--IdentityProvider.token=", "--ServerApp.password=", "--LabApp.news_url=None",
         "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
        cwd=home, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=2)
                break
            except OSError:
                assert server.poll() is None, (home / "lab.log").read_text()
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        opened = play.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    page.close()


def run_all(page, address: str, name: str) -> None:
    """Open a notebook, run all of its cells, and wait until the kernel is idle again."""
    page.goto(f"{address}/lab/tree/notebooks/{name}?reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', state="attached", timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Restart Kernel and Run All Cells…", exact=True).click()
    page.get_by_role("button", name="Restart", exact=True).click()
    last = page.locator(".jp-CodeCell .jp-InputPrompt").last
    page.wait_for_function("() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
                           ".some(prompt => prompt.textContent.includes('*'))", timeout=60_000)
    page.wait_for_function("() => ![...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
                           ".some(prompt => prompt.textContent.includes('*'))", timeout=180_000)
    assert re.fullmatch(r"\[\d+\]:", last.text_content().strip())
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0


def image_of(widget) -> str:
    return widget.locator("img").first.get_attribute("src")


def test_lesson_00_runs_and_its_stepper_follows_the_keyboard(page, lab):
    run_all(page, lab, "00_two_jobs.ipynb")
    widget = page.locator(".jp-OutputArea-output .widget-vbox").first
    widget.scroll_into_view_if_needed()
    handle = widget.locator(".noUi-handle")
    before, at = image_of(widget), handle.get_attribute("aria-valuetext") or handle.get_attribute("aria-valuenow")
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("([image, old]) => image.src !== old", arg=[widget.locator("img").first.element_handle(), before])
    assert (handle.get_attribute("aria-valuetext") or handle.get_attribute("aria-valuenow")) != at
    assert page.errors == []
    shots = os.environ.get("LLM_LESSONS_SCREENSHOTS")
    if shots:
        widget.screenshot(path=Path(shots) / "00_stepper.png")
