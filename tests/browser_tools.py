"""A real JupyterLab and a real browser for the tests: open a notebook, run it, use its widgets as a person would.

`conftest.py` takes the fixtures from here. All tests share one server; a test's kernels are shut down when it is over.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# playwright's own download of a browser is not available everywhere.
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
PATIENCE = 240_000  # milliseconds: a machine that is busy with other things must not fail a test
LAZY = 250  # milliseconds between two looks at a page whose kernel works: else it looks, and paints, 60 times a second
ERROR = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.{}']"
NEWS = {"fetchNews": "false", "checkForUpdates": False}  # or JupyterLab's question about news lies over the widgets

# Put behind a lesson's cells: prints for each of its widgets what the kernel holds, {description or trait: value}, and
# the hash of its picture.
ASK = '''
import hashlib, ipywidgets, json
from llm_lessons.classroom.widgets import Interactive

def held(widget):
    if hasattr(widget, "thumbnails"):
        return {name: getattr(widget, name) for name in ("layer", "head", "token")}
    found = {}
    for child in getattr(widget, "children", ()):
        found |= held(child)
    if isinstance(widget, ipywidgets.Image):
        found["picture"] = hashlib.sha256(widget.value).hexdigest()
    elif hasattr(widget, "value") and not isinstance(widget, ipywidgets.HTML):
        found[widget.description or type(widget).__name__] = widget.value
    return found

print(json.dumps([held(shown.widget) for shown in Out.values() if isinstance(shown, Interactive)]))
'''


class Lab:
    """A running JupyterLab: its address, its token, and the folder it serves."""

    def __init__(self, home: Path, port: int):
        self.home, self.address, self.token = home, f"http://127.0.0.1:{port}", secrets.token_hex(16)

    def call(self, method: str, path: str):
        """Answer of the server's own interface, or None where it has nothing to say."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.address}/api{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE / 1000) as answer:
            return json.loads(answer.read() or "null")

    def shut_kernels(self) -> None:
        for session in self.call("GET", "/sessions"):
            self.call("DELETE", f"/sessions/{session['id']}")

    def write(self, name: str, cells: list) -> str:
        """Put a notebook of these cells there, without outputs; returns where a browser finds it."""
        book = nbformat.v4.new_notebook(cells=cells)
        book.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
        for cell in cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(book, self.home / name)
        return f"{self.address}/lab/tree/{name}?reset&token={self.token}"


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The one JupyterLab of all tests, on a free port, with settings and data of its own."""
    home = tmp_path_factory.mktemp("lab")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = Lab(home, free.getsockname()[1])
    settings = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(NEWS))
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data"),
                   "IPYTHONDIR": str(home / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
                   "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "JUPYTER_TOKEN": found.token}
    log = open(home / "lab.log", "w")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", found.address.replace("http://127.0.0.1:",
         "--port="), "--ServerApp.port_retries=0"], cwd=home, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(240):
            try:
                found.call("GET", "/status")
                break
            except OSError:
                assert server.poll() is None, (home / "lab.log").read_text()
                time.sleep(0.5)
        yield found
    finally:
        server.terminate()
        server.wait(60)
        log.close()


@pytest.fixture(scope="module")
def browser():
    """Not for the whole session: as long as it is open, playwright's event loop runs, and nbclient's cannot."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        opened = play.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=PATIENCE)
        yield opened
        opened.close()


@contextmanager
def new_page(browser, lab):
    """A new page, with the light theme; `page.errors` gathers what its console calls errors."""
    (lab.home / "settings" / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings").unlink(True)
    page = browser.new_page(viewport={"width": 1280, "height": 1200})
    page.set_default_timeout(PATIENCE)
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    try:
        yield page
    finally:
        page.close()
        lab.shut_kernels()


@pytest.fixture
def page(browser, lab):
    """A page for one test."""
    with new_page(browser, lab) as page:
        yield page


def lesson_cells(name: str) -> list:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells


def code(*sources: str) -> list:
    return [nbformat.v4.new_code_cell(source) for source in sources]


def run_all(page, lab: Lab, name: str, cells: list) -> None:
    """Open a notebook of these cells, run them all, wait for the last; none may print an error or a warning."""
    page.goto(lab.write(f"{name}.ipynb", cells))
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    # Asked to run before a kernel is there, JupyterLab asks back which one it should be.
    page.wait_for_function("() => [...document.querySelectorAll('.jp-KernelName')]"
                           ".some(name => name.textContent.includes('ipykernel'))")
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', state="attached")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    # The kernel is fresh. (A restart makes JupyterLab itself log an error now and then, about its debugger.)
    page.locator("#jp-mainmenu-run").get_by_text("Run All Cells", exact=True).click()
    prompts = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(prompt => prompt.textContent)"
    page.wait_for_function(f"() => document.querySelector(\"{ERROR.format('error')}\") ||"
                           f" {prompts}.every(text => /\\d/.test(text))", timeout=300_000, polling=LAZY)
    for kind in ("error", "stderr"):
        printed = page.locator(ERROR.format(kind)).all_text_contents()
        assert printed == [], printed
    count = sum(cell.cell_type == "code" for cell in cells)
    assert page.evaluate(f"() => {prompts}") == [f"[{number}]:" for number in range(1, count + 1)]


def output(page, number: int):
    """The widget that cell `number` (markdown counts too) of the open notebook shows, scrolled into view."""
    widget = page.locator(".jp-Notebook .jp-Cell").nth(number).locator(".jp-OutputArea-output > .jupyter-widgets, "
                                                                       ".jp-OutputArea-output .llm-attention").first
    widget.scroll_into_view_if_needed()
    return widget


def in_kernel(page) -> list[dict]:
    """What the kernel holds for each widget, asked with the last cell, `ASK`."""
    cell = page.locator(".jp-CodeCell").last
    prompt = cell.locator(".jp-InputPrompt")
    before = prompt.text_content()
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_function("([node, old]) => /\\d/.test(node.textContent) && node.textContent !== old",
                           arg=[prompt.element_handle(), before])
    return json.loads(cell.locator(".jp-OutputArea-output").text_content())


def shown(page, widget, words: str | re.Pattern) -> None:
    """Wait until the widget shows these words, or what the pattern describes."""
    pattern = words.pattern if isinstance(words, re.Pattern) else re.escape(words)
    page.wait_for_function("([element, pattern]) => new RegExp(pattern).test(element.textContent)",
                           arg=[widget.element_handle(), pattern])


@contextmanager
def redrawn(page, widget):
    """What is done inside must give the widget another picture, and one that the browser can show."""
    picture = widget.locator("img").first
    before = picture.get_attribute("src")
    yield
    page.wait_for_function("([image, old]) => image.src !== old && image.complete && image.naturalWidth > 0",
                           arg=[picture.element_handle(), before])


def shows(widget, sha256: str) -> bool:
    """Does the page show the picture with this hash?"""
    return sha256 == widget.locator("img").first.evaluate("""async image => {
        const bytes = await (await fetch(image.src)).arrayBuffer();
        const hash = [...new Uint8Array(await crypto.subtle.digest("SHA-256", bytes))];
        return hash.map(byte => byte.toString(16).padStart(2, "0")).join("") }""")


def held_when_drawn(page, widgets: list) -> list[dict]:
    """What the kernel holds for each widget, as soon as the page shows the pictures that the kernel drew last.

    Asked more than once: a dragged slider sends several values, and while one is drawn the kernel holds the one before.
    """
    for _ in range(60):
        held = in_kernel(page)
        pictures = [values.pop("picture", None) for values in held]
        if all(not picture or shows(widget, picture) for widget, picture in zip(widgets, pictures)):
            return held
        page.wait_for_timeout(1000)
    raise AssertionError("the page does not show the pictures that the kernel drew last")


def control(widget, label: str):
    """The slider, menu or field with this label in front."""
    return widget.locator(f".widget-inline-hbox:has(> .widget-label:text-is({json.dumps(label)}))")


def keys(page, widget, label: str, key: str, times: int = 1) -> None:
    """Move a slider with the keyboard."""
    control(widget, label).locator(".noUi-handle").focus()
    for _ in range(times):
        page.keyboard.press(key)


def drag(page, widget, label: str, end: int) -> None:
    """Drag a slider's handle with the mouse to its first (0) or last value (1), and a little too far.

    The page may move under the mouse while a picture comes: a handle that was missed is taken again.
    """
    slider = control(widget, label)
    for _ in range(5):
        slider.scroll_into_view_if_needed()
        handle, track = slider.locator(".noUi-handle").bounding_box(), slider.locator(".noUi-base").bounding_box()
        y = handle["y"] + handle["height"] / 2
        page.mouse.move(handle["x"] + handle["width"] / 2, y)
        page.mouse.down()
        page.mouse.move(track["x"] + end * track["width"] + (10 if end else -10), y, steps=5)
        page.mouse.up()
        now, last = (float(slider.locator(".noUi-handle").get_attribute(name))
                     for name in ("aria-valuenow", "aria-valuemax" if end else "aria-valuemin"))
        if now == last:
            return
    raise AssertionError(f"{label} stands at {now}: its handle cannot be dragged to {last}")


def choose(widget, label: str, option: str) -> None:
    control(widget, label).locator("select").select_option(option)


def choose_theme(page, theme: str) -> None:
    """"JupyterLab Light" or "JupyterLab Dark", in the menu; waits until the page wears it."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text(theme, exact=True).click()
    page.wait_for_selector(f'body[data-jp-theme-name="{theme}"]', state="attached")


def keep_screenshot(widget, name: str) -> None:
    """Store a picture of the widget where LLM_LESSONS_SCREENSHOTS says, if it says so."""
    if folder := os.environ.get("LLM_LESSONS_SCREENSHOTS"):
        widget.screenshot(path=Path(folder) / f"{re.sub(r'[^0-9a-z_]+', '_', name.lower())}.png")
