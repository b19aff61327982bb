"""What the tests of the engine share: transformers' answers, a clock, a sampler that says what it is told."""

import torch
from cache_kinds import MODEL
from tiny import as_transformers

import llm_lessons as ll

ORACLE = as_transformers(MODEL)


def right(ids):
    with torch.no_grad():
        return ORACLE(torch.tensor([ids])).logits[0, -1]


def alone(ids, count):
    """Greedy ids of transformers, each from a pass over the whole text."""
    answer = []
    for _ in range(count):
        answer.append(int(right(ids + answer).argmax()))
    return answer


def script(ids):
    """A sampler that says these ids one after the other, whatever the model thinks."""
    steps = iter(ids)
    return lambda logits, history: next(steps)


class Clock:
    """A clock that stands still, except that each call of the model takes a second."""

    def __init__(self, monkeypatch, model=MODEL):
        self.now, self.calls, body = 0.0, [], model.body

        def timed(ids, *rest):
            self.now += 1
            self.calls.append(list(torch.as_tensor(ids).shape))
            return body(ids, *rest)

        monkeypatch.setattr(model, "body", timed)

    def __call__(self):
        return self.now


def new_engine(blocks=40, block_size=4, model=MODEL, **settings):
    return ll.Engine(model, kv_blocks=blocks, block_size=block_size, **settings)


def all_free(engine):
    return engine.pool.free_blocks == engine.pool.blocks and not engine.running and not engine.waiting


def told(steps, requests):
    """The steps as numbers of requests: decoded, prefilled, preempted, finished."""
    number = requests.index
    return [([number(r) for r in step.decoded], [(number(r), count) for r, count in step.prefilled],
             [number(r) for r in step.preempted], [number(r) for r in step.finished]) for step in steps]
