"""`python -m llm_lessons "How does inference work?"`: the model's answer, and how long each of the two jobs took."""

from __future__ import annotations

import argparse
import io
import os
import sys

from .download import GPT2, SMOLLM2, DownloadError
from .generate import generate
from .pretrained import load_pretrained
from .timing import timed
from .tokenizer import stream_text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llm_lessons", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="what to ask the model")
    parser.add_argument("--model", default=SMOLLM2.name, help="its name, or a folder in Hugging Face layout")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--fetch", action="store_true", help="fetch what the course needs into the cache, and stop")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?", and the answer goes on
    if not options.fetch and not options.prompt:
        parser.error('ask something: python -m llm_lessons "How does inference work?"')
    try:
        if options.fetch:
            print("the model is in", SMOLLM2.fetch())
            print("GPT-2's vocabulary is in", GPT2.fetch())
        else:
            answer(options.prompt, options.model, options.max_new_tokens)
    except BrokenPipeError:  # whoever read the answer has stopped, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (DownloadError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def answer(prompt: str, name: str, max_new_tokens: int) -> None:
    """Stream the answer to standard output, then the times of both jobs; an interrupted answer has times, too."""
    model, tokenizer = load_pretrained(name)
    ids = tokenizer.chat([{"role": "user", "content": prompt}])
    list(generate(model, ids, 2))  # the first pass of all sets up memory and threads: it is not what is timed
    generation = generate(model, ids, max_new_tokens, stop_ids=tokenizer.stop_ids)
    seconds: list[float] = []

    def tokens():
        for token, duration in timed(generation, model.device):
            seconds.append(duration)
            yield token

    try:
        for piece in stream_text(tokenizer, tokens()):
            print(piece, end="", flush=True)
    finally:
        print()
        if seconds:
            print(summary(len(ids), seconds, generation.finish_reason or "cancelled"))


def summary(prompt_tokens: int, seconds: list[float], reason: str) -> str:
    """Time to first token, time per output token, and tokens/s of both jobs. The first token belongs to prefill."""
    first, rest = seconds[0], seconds[1:]
    text = (f"\nprefill  {prompt_tokens} tokens, time to first token (TTFT) {first * 1e3:.0f} ms: "
            f"{prompt_tokens / first:.0f} tokens/s")
    if rest:
        each = sum(rest) / len(rest)
        text += (f"\ndecode   {len(rest)} tokens, time per output token (TPOT) {each * 1e3:.1f} ms: "
                 f"{1 / each:.1f} tokens/s")
    return text + f"\nfinish reason: {reason}"


if __name__ == "__main__":
    sys.exit(main())
