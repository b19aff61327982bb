"""Side by side on this machine: the course's engine, Hugging Face transformers, llama.cpp, on the same weights.

    pip install -r benchmarks/requirements.txt
    python benchmarks/engines.py                         prints a table
    python benchmarks/engines.py --save engines.json     and stores the figures, for the lessons' pictures

Prefill (prompts of 128, 512 and 2048 tokens; every engine computes the output head for the last one only) and decode
(32 tokens behind contexts of 32 and 512), one request at a time, with the same number of threads. The engines take
turns within each round, so that a busy moment of the machine meets all of them alike; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import llm_lessons as ll
from llm_lessons.classroom.style import this_machine
from llm_lessons.download import SMOLLM2
from llm_lessons.pretrained import DTYPES, WEIGHTS

NEW_TOKENS = 32


def random_ids(length: int) -> list[int]:
    """Random words: what they say does not matter to the time they take."""
    return torch.randint(1000, 40_000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


class Course:
    """This course's engine: `ll.prefill`, then `ll.decode`."""

    name = "llm_lessons"

    def __init__(self, path: Path, weights: str):
        self.name, self.dtype = f"{self.name} {weights}", weights
        self.model, _ = ll.load_pretrained(path, weights=weights, device="cpu")
        self.weight_bytes = self.model.nbytes

    def seconds(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """Seconds for the first token, and for each of the `new_tokens` after it."""
        times = [s for _, s in ll.timed(ll.generate(self.model, ids, new_tokens + 1))]
        return times[0], sum(times[1:]) / max(1, new_tokens)


class Transformers:
    """Hugging Face transformers: `generate`, with its own cache, reading the same GGUF file."""

    name = "transformers"

    def __init__(self, path: Path, weights: str):
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.name, self.dtype = f"{self.name} {weights}", weights
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name,
                                                          dtype=getattr(torch, weights))
        self.weight_bytes = sum(weight.nbytes for weight in self.model.parameters())

    def _generate(self, ids: list[int], tokens: int) -> float:
        inputs = torch.tensor([ids])
        start = time.perf_counter()
        self.model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens,
                            min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return time.perf_counter() - start

    def seconds(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        first = self._generate(ids, 1)
        return first, (self._generate(ids, new_tokens + 1) - first) / new_tokens if new_tokens else 0.0


class LlamaCpp:
    """llama.cpp on the file as it is (4-bit linear layers, 8-bit embedding), by its own clock."""

    name, dtype = "llama.cpp Q4_1", None

    def __init__(self, path: Path):
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 2304, 1, False, -1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
        self.server, self.weight_bytes = xllamacpp.Server(settings), path.stat().st_size

    def seconds(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        times = self.server.handle_completions({"prompt": ids, "n_predict": new_tokens + 1, "temperature": 0.0,
                                                "cache_prompt": False, "ignore_eos": True})["timings"]
        return times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3 / max(1, new_tokens)


class Apart:
    """An engine in a process of its own, and its name, dtype and weight_bytes here.

    Two engines in one process hinder each other: their OpenMP threads, more than there are CPUs, go to sleep after
    every small operation. A decode step of this course took a third longer beside llama.cpp than without it.
    """

    def __init__(self, make, *settings):
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_start, initargs=(make, settings))
        self.name, self.dtype, self.weight_bytes = self._process.submit(_describe).result()

    def seconds(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        return self._process.submit(_seconds, ids, new_tokens).result()


def _start(make, settings) -> None:
    global _engine
    ll.set_threads()
    _engine = make(*settings)


def _describe() -> tuple[str, str | None, int]:
    return _engine.name, _engine.dtype, _engine.weight_bytes


def _seconds(ids: list[int], new_tokens: int) -> tuple[float, float]:
    return _engine.seconds(ids, new_tokens)


def measure(engines: list, prompts: list[int], contexts: list[int], rounds: int) -> dict:
    """(engine, job, length) -> median seconds, prefill of the whole prompt or decode of one token."""
    found: dict = {}
    for turn in range(rounds + 1):  # the first round warms up
        for job, lengths in (("prefill", prompts), ("decode", contexts)):
            for length in lengths:
                for engine in engines:
                    first, each = engine.seconds(random_ids(length), NEW_TOKENS if job == "decode" else 0)
                    if turn:
                        found.setdefault((engine.name, job, length), []).append(first if job == "prefill" else each)
        print(f"round {turn} of {rounds}" + (" (warm-up)" if turn == 0 else ""), file=sys.stderr, flush=True)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def per_second(job: str, length: int, seconds: float) -> float:
    """Tokens per second: prefill reads the whole prompt in that time, decode writes one token."""
    return (length if job == "prefill" else 1) / seconds


def table(found: dict, engines: list, shape: ll.Shape, roof: ll.Roofline) -> str:
    """A row for each engine and measurement: tokens/s, the ratio to transformers float32, the share of the roof."""
    lines = ["| job | tokens | engine | tokens/s | × transformers float32 | share of the peak |",
             "|---|---|---|---|---|---|"]
    for job, length in dict.fromkeys(key[1:] for key in found):
        for engine in engines:
            seconds = found[engine.name, job, length]
            rate = per_second(job, length, seconds)
            other = found.get(("transformers float32", job, length))
            ratio = f"{other / seconds:.2f}" if other else ""
            if job == "decode":
                share = f"{engine.weight_bytes / seconds / roof.bytes_per_second:.0%} of bandwidth (weights alone)"
            else:
                peak = roof.flops_per_second.get(engine.dtype)
                flops = shape.prefill_flops(length)
                share = f"{flops / seconds / peak:.0%} of {engine.dtype} arithmetic" if peak else ""
            lines.append(f"| {job} | {length} | {engine.name} | {rate:.1f} | {ratio} | {share} |")
    return "\n".join(lines)


def record(found: dict, machine: str) -> dict:
    """What the lessons draw beside the learner's own figures: tokens/s of each engine, and where they come from."""
    return {"machine": machine, "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "benchmarks/engines.py", *sys.argv[1:]]),
            "results": [{"job": job, "tokens": length, "engine": name,
                         "tokens_per_second": round(per_second(job, length, seconds), 1)}
                        for (name, job, length), seconds in found.items()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--contexts", type=int, nargs="*", default=[32, 512])
    parser.add_argument("--skip", nargs="*", default=[], metavar="ENGINE", help="engines to leave out, by name: "
                        "transformers bfloat16 takes minutes on a CPU without bfloat16 instructions")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file too")
    options = parser.parse_args()
    path = SMOLLM2.fetch() / next(iter(SMOLLM2.files))
    ll.set_threads()
    roof = ll.measure_roofline("cpu")
    makers = {f"{maker.name} {weights}": (maker, path, weights)
              for maker, kinds in ((Course, WEIGHTS), (Transformers, DTYPES)) for weights in kinds}
    makers[LlamaCpp.name] = (LlamaCpp, path)
    if unknown := set(options.skip) - set(makers):
        parser.error(f"--skip knows {', '.join(makers)}, not {', '.join(unknown)}")
    engines = [Apart(*maker) for name, maker in makers.items() if name not in options.skip]
    found = measure(engines, options.prompts, options.contexts, options.rounds)
    peaks = ", ".join(f"{name} {peak / 1e9:.0f} GFLOP/s" for name, peak in roof.flops_per_second.items())
    print(f"{this_machine()}, {time.strftime('%Y-%m-%d')}; peaks measured just before: {peaks}, "
          f"memory {roof.bytes_per_second / 1e9:.1f} GB/s\n")
    print(table(found, engines, ll.SHAPES["smollm2-135m"], roof))
    if options.save:
        options.save.write_text(json.dumps(record(found, this_machine()), indent=1) + "\n")


if __name__ == "__main__":
    main()
