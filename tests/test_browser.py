"""The lessons in a real JupyterLab, in a real browser: run all cells, use every widget as a person would.

Skipped where no Chromium is found: playwright's own download of one is not available everywhere.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
         "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--LabApp.news_url=None",
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
    """Open a notebook, run all of its cells, and wait until the last one is done; no cell may print an error."""
    page.goto(f"{address}/lab/tree/notebooks/{name}?reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
    # Asked to run before a kernel is there, JupyterLab asks back which one it should be.
    page.wait_for_function("() => [...document.querySelectorAll('.jp-KernelName')]"
                           ".some(name => name.textContent.includes('ipykernel'))", timeout=120_000)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', state="attached", timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    # The kernel is fresh. (A restart makes JupyterLab itself log an error now and then, about its debugger.)
    page.get_by_text("Run All Cells", exact=True).click()
    prompts = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(prompt => prompt.textContent)"
    page.wait_for_function(f"() => {prompts}.some(text => text.includes('*'))", timeout=60_000)
    page.wait_for_function(f"() => {prompts}.every(text => !text.includes('*'))", timeout=240_000)
    numbers = [int(text.strip("[]: ")) for text in page.evaluate(f"() => {prompts}")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0


def shown(page, widget, words: str) -> None:
    """Wait until the widget shows these words."""
    page.wait_for_function("([element, words]) => element.textContent.includes(words)",
                           arg=[widget.element_handle(), words], timeout=60_000)


def keep_screenshot(widget, name: str) -> None:
    """Store a picture of the widget where LLM_LESSONS_SCREENSHOTS says, if it says so."""
    if folder := os.environ.get("LLM_LESSONS_SCREENSHOTS"):
        widget.screenshot(path=Path(folder) / f"{name}.png")


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
    page.wait_for_function("([image, old]) => image.src !== old",
                           arg=[widget.locator("img").first.element_handle(), before])
    assert (handle.get_attribute("aria-valuetext") or handle.get_attribute("aria-valuenow")) != at
    assert page.errors == []
    keep_screenshot(widget, "00_stepper")


def test_lesson_01_runs_and_its_explorer_shows_any_text_as_text(page, lab):
    run_all(page, lab, "01_tokenization.ipynb")
    widget = page.locator(".jp-OutputArea-output .widget-vbox").first
    area = widget.locator("textarea")
    area.scroll_into_view_if_needed()
    area.fill("<img src=x onerror='document.title=1'>&amp; שלום")
    shown(page, widget, "for 48 characters")
    assert widget.locator("img").count() == 0
    before = widget.text_content()
    widget.locator("select").select_option("GPT-2")
    page.wait_for_function("([element, old]) => element.textContent !== old",
                           arg=[widget.element_handle(), before], timeout=60_000)
    widget.locator("select").select_option("the course's model")
    area.fill("\U00040000")
    shown(page, widget, "cannot be encoded")
    area.fill("How does inference work? 你好 🦙 <b>&")
    shown(page, widget, "·inference")
    keep_screenshot(widget, "01_explorer")
    assert page.errors == []


def test_lesson_02_runs_and_its_two_widgets_answer(page, lab):
    run_all(page, lab, "02_embeddings.ipynb")
    finder, dials = (page.locator(".jp-OutputArea-output .widget-vbox").nth(n) for n in (0, 1))
    finder.scroll_into_view_if_needed()
    field = finder.locator("input[type=text]").first
    field.fill("<img src=x onerror=document.title='HACKED'>")
    field.press("Enter")
    field.fill("ice cream")
    field.press("Enter")
    shown(page, finder, "2 tokens")
    assert finder.locator("img").count() == 1 and page.title() != "HACKED"
    keep_screenshot(finder, "02_neighbours")
    dials.scroll_into_view_if_needed()
    before = image_of(dials)
    dials.locator(".noUi-handle").nth(2).focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("([image, old]) => image.src !== old",
                           arg=[dials.locator("img").first.element_handle(), before], timeout=60_000)
    assert "score -3.456" in dials.inner_text()
    keep_screenshot(dials, "02_dials")
    assert page.errors == []


def test_lesson_03_runs_and_its_explorer_shows_the_head_that_is_clicked(page, lab):
    run_all(page, lab, "03_attention.ipynb")
    explorer = page.locator(".llm-attention")
    explorer.scroll_into_view_if_needed()
    page.wait_for_function("node => node.dataset.layer === '18' && node.dataset.head === '6'",
                           arg=explorer.element_handle(), timeout=60_000)
    explorer.get_by_role("gridcell", name="layer 16, head 0", exact=True).click()
    page.wait_for_function("node => node.dataset.layer === '16' && node.dataset.head === '0'",
                           arg=explorer.element_handle(), timeout=60_000)
    keep_screenshot(explorer, "03_explorer")
    assert page.errors == []


def test_lesson_04_runs_and_its_playground_filters_and_draws(page, lab):
    run_all(page, lab, "04_next_token.ipynb")
    widget = page.locator(".jp-OutputArea-output .widget-vbox").first
    widget.scroll_into_view_if_needed()
    shown(page, widget, "7 tokens can come")
    widget.locator(".noUi-handle").nth(1).focus()  # top-k, which stands at 12
    for _ in range(9):
        page.keyboard.press("ArrowLeft")
    shown(page, widget, "3 tokens can come")
    before = image_of(widget)
    widget.get_by_text("draw 100").click()
    page.wait_for_function("([image, old]) => image.src !== old",
                           arg=[widget.locator("img").first.element_handle(), before], timeout=60_000)
    shown(page, widget, "last drawn")
    keep_screenshot(widget, "04_playground")
    assert page.errors == []
