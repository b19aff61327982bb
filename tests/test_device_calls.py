"""Devices: nothing of a GPU meets anything of the CPU, and nobody reads the clock while a GPU still works.

All of it runs on any computer, on the GPU of pretend_gpu.py, which is not there: the package, and the lessons.
"""

import ast
import contextlib
import os
import re
from pathlib import Path

import nbformat
import pytest
import torch
from pretend_gpu import pretend
from tiny import SHAPE, random_ids, tiny_model
from tiny import one_thread as one_thread

import llm_lessons as ll
from llm_lessons import packed_linear, timing

PATHS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
TIMERS = {"stopwatch", "timed", "in_turns", "measure_roofline"}
IDS = random_ids(12)


@pytest.fixture(params=["cuda", "mps"])
def gpu(request):
    packed_linear._works.cache_clear()
    with pretend(request.param) as gpu:
        yield gpu
    packed_linear._works.cache_clear()


def measured_early(gpu):
    """Where a duration was measured while the GPU worked. The moment at which a request comes in is no duration."""
    arrivals = "request.py", "traffic.py"
    return [where for where in gpu.early if Path(where.rsplit(":", 1)[0]).name not in arrivals]


def on(device, **shape):
    """The tiny model on a device."""
    cpu = tiny_model(**shape)
    model = ll.Model(cpu.config, device=device)
    model.load_state_dict(cpu.state_dict())
    return model


# --- The GPU that is not there ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("mistake", [
    lambda x: x + torch.ones(3), lambda x: torch.ones(3).add_(x), lambda x: torch.stack([x, torch.ones(3)]),
    lambda x: x @ torch.ones(3), lambda x: x.numpy(), lambda x: torch.ones(3)[x.argsort()],
    lambda x: torch.equal(x, torch.ones(3)),
    lambda x: x.normal_(generator=torch.Generator()), lambda x: x.long() @ x.long(),
    lambda x: torch.nn.functional.embedding(torch.tensor([0]), x[None]),
    lambda x: x.__setitem__(torch.tensor([0]), torch.ones(1))])
def test_what_a_gpu_refuses_is_refused(gpu, mistake):
    with pytest.raises((RuntimeError, TypeError), match="device|not implemented for"):
        mistake(torch.zeros(3, device=gpu.kind))


def test_what_a_gpu_allows_is_allowed(gpu):
    x = torch.arange(3.0, device=gpu.kind)
    x[:2] = torch.tensor([5.0, 6.0])
    assert x.device.type == (x * torch.tensor(2.0)).device.type == x[torch.tensor([0])].device.type == gpu.kind
    copy = x.cpu()
    copy.zero_()
    assert x.tolist() == [5, 6, 2] and copy.numpy().tolist() == [0, 0, 0] and copy.device.type == "cpu"
    assert torch.ones(3).copy_(x).device.type == "cpu"
    assert [part.device.type for part in x.topk(2)] == [gpu.kind] * 2
    assert repr(x) == f"tensor([5., 6., 2.], device='{gpu.kind}:0')" and f"{x[0]:.1f}" == "5.0"


def test_only_mps_lacks_float64(gpu):
    x = torch.zeros(1, device=gpu.kind)
    with pytest.raises(TypeError, match="float64") if gpu.kind == "mps" else contextlib.nullcontext():
        x.double()


def test_it_works_until_the_program_waits(gpu):
    x = torch.ones(3, device=gpu.kind)
    for wait in (lambda: ll.synchronize(gpu.kind), lambda: (x + 1).sum().item(), lambda: (x + 1).tolist(), x.cpu):
        x.mul_(1)
        assert gpu.busy
        wait()
        assert not gpu.busy


# --- The package ------------------------------------------------------------------------------------------------------

def test_a_clock_read_too_early_is_noticed(gpu):
    model = on(gpu.kind)
    ll.stopwatch(lambda: model(IDS), runs=2)  # forgot to say which device
    assert gpu.early
    gpu.early.clear()
    ll.stopwatch(lambda: model(IDS), gpu.kind, runs=2)
    ll.in_turns({"a": lambda: model(IDS), "b": lambda: model(IDS[:3])}, gpu.kind, rounds=2)
    assert len(list(ll.timed((model(IDS[:n])[-1].argmax() for n in (1, 2)), gpu.kind))) == 2
    assert not gpu.early and gpu.waits


@pytest.mark.parametrize("kind, settings", [
    (ll.KVCache, {}), (ll.GrowingCache, {}), (ll.SlidingCache, {"window": 5}), (ll.PagedCache, {}),
    (ll.QuantizedCache, {"bits": 8}), (ll.QuantizedCache, {"bits": 4})])
def test_every_cache_serves_a_gpu(gpu, kind, settings):
    written = []
    for model in (tiny_model(), on(gpu.kind)):
        cache = model.new_cache(120, kind=kind, **settings)
        sampler = ll.Sampler(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3)
        written.append(list(ll.generate(model, IDS, 90, sampler, cache=cache)))
        cache.truncate(0)
    assert written[0] == written[1] and len(written[0]) == 90


def test_the_engine_serves_a_gpu_and_its_times_are_those_of_finished_work(gpu):
    written = []
    for model in (tiny_model(), on(gpu.kind)):
        engine = ll.Engine(model, max_batch=2, kv_blocks=12, block_size=4, token_budget=6)
        ll.synchronize(gpu.kind)
        requests = [engine.submit(IDS[:n], 8, tenant=tenant) for n, tenant in ((12, "a"), (5, "b"), (9, "a"))]
        engine.run()
        written.append([request.tokens for request in requests])
    assert written[0] == written[1]
    assert not measured_early(gpu)


@pytest.mark.parametrize("settings", [{}, {"bits": 4, "group_size": 32},
                                      {"bits": 4, "group_size": 32, "symmetric": False}])
def test_quantized_models_run_on_a_gpu(gpu, settings):
    shape = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 96}
    logits = []
    for model in (tiny_model(**shape), on(gpu.kind, **shape)):
        packed = ll.quantize_model(model, **settings)
        logits.append(ll.prefill(packed, IDS, packed.new_cache(20)).float().cpu())
    assert torch.nn.functional.cosine_similarity(*logits, dim=0) > 0.99  # other kernels round in other places


def test_looking_inside_and_judging_work_on_a_gpu(gpu):
    model, cpu = on(gpu.kind), tiny_model()
    seen = ll.trace(model, IDS)
    assert torch.allclose(seen.attention(1).cpu(), ll.trace(cpu, IDS).attention(1), atol=1e-5)
    ids = random_ids(1024)[:1020]
    there = ll.score(model, ids)
    assert there.perplexity.value == pytest.approx(ll.score(cpu, ids).perplexity.value, rel=1e-4)
    assert ll.compare(there, there).kl.value == pytest.approx(0, abs=1e-6)


def test_a_random_model_has_the_same_weights_on_every_device(gpu):
    config = ll.ModelConfig(**SHAPE)
    there, here = ll.Model.random(config, device=gpu.kind), ll.Model.random(config)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there.parameters(), here.parameters()))


# --- The lessons ------------------------------------------------------------------------------------------------------

def code(path):
    """A lesson's cells of code behind the set-up."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"][1:]


def uses_a_gpu(path):
    source = "".join(code(path))
    return "load_pretrained(" in source and 'load_pretrained(device="cpu")' not in source


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_time_in_a_lesson_is_taken_by_a_timer_that_knows_the_device(path):
    for source in code(path):
        assert not re.search(r"perf_counter|monotonic|time\.time|%time|import time\b", source), "use ll.stopwatch"
        for call in ast.walk(ast.parse(source)):
            name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
            if name in TIMERS and uses_a_gpu(path) and ".cpu()" not in source:
                given = [ast.unparse(argument) for argument in [*call.args, *(word.value for word in call.keywords)]]
                assert {"device", "model.device"} & set(given), ast.unparse(call)


class Graph:
    """In the place of a CUDA graph."""

    def replay(self):
        pass


def quickly(monkeypatch):
    """Each timed function once, and the peaks of a large GPU: measuring those takes it 0.2 s, and a CPU a minute."""
    stopwatch, roof = timing.stopwatch, {"float32": 5e13, "bfloat16": 4e14}
    for module in (ll, timing):
        monkeypatch.setattr(module, "stopwatch", lambda fn, device="cpu", runs=7, warmup=1: stopwatch(fn, device, 1, 0))
    monkeypatch.setattr(ll, "measure_roofline", lambda device="cpu", seconds=0.8: ll.Roofline(
        roof, 2e12, dict.fromkeys([*roof, "memory"], 0.01)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())


SLOW = pytest.mark.skipif("LESSONS_ON_A_GPU" not in os.environ, reason="takes a minute: set LESSONS_ON_A_GPU=1")


@pytest.mark.parametrize("path", [pytest.param(path, marks=SLOW) if path.stem == "09_batching" else path
                                  for path in PATHS if uses_a_gpu(path)], ids=lambda path: path.stem)
def test_a_lesson_runs_on_a_gpu(path, monkeypatch):
    """Large products are made up, so the numbers are nonsense; which tensors meet, and when a clock is read, is not."""
    quickly(monkeypatch)
    monkeypatch.chdir(path.parent)
    names = {"__name__": "__main__"}
    with pretend("cuda", largest=1e5) as gpu:
        for number, source in enumerate(code(path), 2):
            tree = ast.parse(source)
            last = tree.body.pop().value if isinstance(tree.body[-1], ast.Expr) else ast.Constant(None)
            exec(compile(tree, f"<cell {number}>", "exec"), names)
            last = ast.fix_missing_locations(ast.Expression(last))
            shown = eval(compile(last, f"<cell {number}>", "eval"), names)
            getattr(shown, "_repr_png_", lambda: None)()
    assert not measured_early(gpu)
