"""Will it fit, for how many users, and how fast at best? From a model's shape and a device's data sheet.

Nothing here is loaded, allocated or measured: `plan` answers before you download a model or rent a machine.

What it takes for granted, so that you can judge its answers:

- Times count the bytes that must be read and the matrix products that must be done, at the peak rates of the device.
  They are the least for a program that makes one token a step, and does attention and the other products one after the
  other. Your own measurements (MFU, MBU) say how near yours comes.
- Every user's sequence has the same length, `context` tokens, all of them in the cache. No two users share a prefix.
- Fewer bits shrink what is stored and read. The arithmetic stays in 16 bits, as with weight-only quantization.
- All weights have the same number of bits, embedding, head and norms too. Count the scales in: 4.5 for int4 with a
  float16 scale for each 32 weights.
- A GB is 10^9 bytes, a GiB 2^30.

Source of the decode step: Austin et al. 2025, "How to Scale Your Model", https://jax-ml.github.io/scaling-book/inference
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from .capacity import Shape, _is_number, roofline_time
from .devices import Device, above_0, at_most_10_15

# Tokens of one pass: a longer prompt is read in pieces. DEFAULT_MAX_NUM_BATCHED_TOKENS in
# https://github.com/vllm-project/vllm/blob/main/vllm/config/scheduler.py (servers with large GPUs set it to 8,192).
PREFILL_CHUNK = 2048

# Kept free: for the driver and its libraries, graphs, fragments, other programs. vLLM's default was 10 % for years (in
# 0.11, say) and is 8 % now: gpu_memory_utilization in https://github.com/vllm-project/vllm/blob/main/vllm/config/cache.py
RESERVE = Fraction(10, 100)

FEWEST_BITS = 2  # a way out that asks for fewer is none: too little is left of the model, or of its cache


def decode_step_time(batch: int, params: float, weight_bytes: float, kv_bytes_per_sequence: float, flops: float,
                     bandwidth: float) -> float:
    """The least time of one decode step, in seconds:

        batch · kv_bytes_per_sequence / bandwidth + max(2 · batch · params / flops, weight_bytes / bandwidth)

    First term: attention reads the cache of each sequence; its arithmetic is taken to hide behind that. Second: the
    weights are read once for all sequences, and multiplied with each. The two are added, because a layer's attention
    and its other products wait for each other; a program that splits the batch can do both at once, and be faster
    (NanoFlow, Zhu et al. 2024, https://arxiv.org/abs/2408.12757). The step makes one token for each sequence.
    """
    batch = at_most_10_15("batch", batch)
    params, weight_bytes, flops, bandwidth = above_0(
        params=params, weight_bytes=weight_bytes, flops=flops, bandwidth=bandwidth)
    if not _is_number(kv_bytes_per_sequence) or kv_bytes_per_sequence < 0:
        raise ValueError(f"kv_bytes_per_sequence must be a number of at least 0, not {kv_bytes_per_sequence!r}")
    cache = batch * float(kv_bytes_per_sequence)  # Python's numbers: numpy's would overflow
    return cache / bandwidth + max(2 * batch * params / flops, weight_bytes / bandwidth)


def prefill_servers(prefill_seconds: float, decode_step_seconds: float, batch: int, answer_tokens: int) -> float:
    """How many prefill servers keep one decode server busy, when the two jobs run on machines of their own:

        prefill_seconds · batch / (answer_tokens · decode_step_seconds)

    A decode server finishes `batch` answers in answer_tokens steps; each began with one prompt, read alone.
    """
    prompt, step = above_0(prefill_seconds=prefill_seconds, decode_step_seconds=decode_step_seconds)
    return prompt * at_most_10_15("batch", batch) / (at_most_10_15("answer_tokens", answer_tokens) * step)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `users` sequences of `context` tokens take on a device: made by `plan`. Memory in bytes, times in seconds.

    Times are "at least": see the top of this file. They hold for the shape, also where the memory does not suffice.
    """

    shape: Shape
    device: Device
    weight_bits: float
    kv_bits: float
    context: int
    users: int

    def __post_init__(self):
        if not isinstance(self.shape, Shape):
            raise ValueError(f"shape must be a Shape, such as ll.SHAPES['llama-3-8b'] or ll.Shape.of(model), not "
                             f"{self.shape!r}")
        if not isinstance(self.device, Device):
            raise ValueError(f"device must be a Device, such as ll.DEVICES['l4'] or ll.Device.measured(…), not "
                             f"{self.device!r}")
        for name in ("weight_bits", "kv_bits"):
            object.__setattr__(self, name, _bits(name, getattr(self, name)))
        for name in ("context", "users"):
            object.__setattr__(self, name, at_most_10_15(name, getattr(self, name)))

    # --- Memory, in bytes -------------------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """All parameters, of `weight_bits` each."""
        return math.ceil(self.shape.parameters * self.weight_bits / 8)

    @property
    def cache(self) -> int:
        """Keys and values of all tokens of all users: users · context · 2 · L · G · D · kv_bits / 8.

        On n devices they take n times what the fullest one has: G / n heads, rounded up, in the place of G (`several`).
        """
        return self._cache(self.context, self.users)

    @property
    def activations(self) -> int:
        """What one pass keeps beside weights and cache, where it is widest; layers follow each other and share it.

        T tokens in one pass: a chunk of a prompt, PREFILL_CHUNK at most, or one token of each user, whichever is more.
        Each has the residual stream and its norm, 2 · C numbers, and beside them either gate, up and their product,
        3 · F, or queries, keys, values and what attention made of them, D · (2 · H + 2 · G); 16 bits for each number.
        At the end come V logits in float32 for each user. The scores of attention are never stored (FlashAttention,
        Dao et al. 2022, https://arxiv.org/abs/2205.14135). An engine takes more: where this says 0.78 GiB, for a pass
        of 8,192 tokens of Llama-3-8B, vLLM logged 1.26 (https://github.com/vllm-project/vllm/pull/10511).
        """
        return self._activations(self.context, self.users)

    @property
    def reserve(self) -> int:
        """10 % of the device's memory, for all that is not counted here."""
        return math.ceil(self.device.memory * RESERVE)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part. They add up to `needed`."""
        return {name: getattr(self, name) for name in ("weights", "cache", "activations", "reserve")}

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def free(self) -> int:
        """What is left of the device's memory; negative when it does not fit."""
        return self.device.memory - self.needed

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def max_users(self) -> int:
        """The most users of `context` tokens each that fit; 0 when not even one does."""
        return _most(lambda users: self._fits(self.context, users))

    @property
    def max_context(self) -> int:
        """The longest context that fits for these users; 0 when no token does.

        The memory allows it. Whether the model was trained for it, a Shape does not know.
        """
        return _most(lambda context: self._fits(context, self.users))

    def _cache(self, context: int, users: int) -> int:
        return math.ceil(users * context * self._kv_bytes_per_token)

    @property
    def _kv_bytes_per_token(self) -> Fraction:
        """On all devices together: each has as many whole heads as the fullest one, at least one."""
        heads, devices = self.shape.kv_heads, self.device.count
        copies = Fraction(-(-heads // devices) * devices, heads)
        return copies * Fraction(self.shape.kv_bytes_per_token(self.kv_bits / 8))

    def _activations(self, context: int, users: int) -> int:
        s, tokens = self.shape, max(min(context, PREFILL_CHUNK), users)
        widest = max(3 * s.ffn, 2 * (s.heads + s.kv_heads) * s.head_dim)
        return tokens * (2 * s.hidden + widest) * 2 + users * s.vocab * 4

    def _fits(self, context: int, users: int) -> bool:
        needed = self.weights + self._cache(context, users) + self._activations(context, users) + self.reserve
        return needed <= self.device.memory

    # --- Time, in seconds -------------------------------------------------------------------------------------------

    @property
    def ttft(self) -> float:
        """The least time to the first token: one prompt of `context` tokens, read alone, its weights read once.

        The time that the prompt waits in a queue comes on top, and so does the decode step that shares the device.
        """
        flops = self.shape.prefill_flops(self.context)
        return roofline_time(flops, self._weights_read + self._cache_of_a_user, self.device.roofline, self.device.dtype)

    @property
    def tpot(self) -> float:
        """The least time per output token: a decode step for all users, each with `context` tokens in the cache."""
        return self._step_time(self._cache_of_a_user)

    @property
    def tokens_per_second(self) -> float:
        """The most tokens that all users together are given in a second: users / tpot."""
        return self.users / self.tpot

    @property
    def bound(self) -> str:
        """The larger part of `tpot`: reading "the caches", or reading "the weights", or else "arithmetic" with them."""
        matrices = self._step_time(0)
        if self.tpot - matrices > matrices:
            return "the caches"
        reading = self._weights_read / self.device.bytes_per_second
        return "arithmetic" if matrices > reading else "the weights"

    @property
    def _weights_read(self) -> float:
        return self.shape.streamed_parameters * self.weight_bits / 8

    @property
    def _cache_of_a_user(self) -> float:
        return self.context * float(self._kv_bytes_per_token)

    def _step_time(self, kv_bytes_per_sequence: float) -> float:
        device = self.device
        return decode_step_time(self.users, self.shape.streamed_parameters, self._weights_read, kv_bytes_per_sequence,
                                device.flops_per_second[device.dtype], device.bytes_per_second)

    # --- In words ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        names = {"cache": "KV cache"}
        sizes = {names.get(name, name): nbytes for name, nbytes in self.parts.items()}
        sizes |= {"together": self.needed, "device": self.device.memory}
        return "\n".join([
            f"{_three(self.shape.parameters / 1e9)} billion weights in {self.weight_bits:g} bits on {self.device.name}",
            f"{_users(self.users)} of {_tokens(self.context)}, KV cache in {self.kv_bits:g} bits",
            *(f"  {name:<12}{nbytes / 1e9:>10,.2f} GB {nbytes / 2**30:>10,.2f} GiB" for name, nbytes in sizes.items()),
            *self._verdict(),
            f"TTFT: at least {_seconds(self.ttft)} for a prompt of {_tokens(self.context)}, read alone",
            f"TPOT: at least {_seconds(self.tpot)}, bound by {self.bound}; for all users together at most "
            f"{_three(self.tokens_per_second)} tokens/s",
        ])

    def _verdict(self) -> list[str]:
        """Does it fit, and how much more would; or what is missing, and each change that would do on its own."""
        if self.fits:
            these, each = ("this user", "") if self.users == 1 else (f"these {self.users:,} users", " each")
            return [f"It fits, and {_size(self.free)} are free: room for at most {_users(self.max_users)} of "
                    f"{_tokens(self.context)}, or for {these} with {_tokens(self.max_context)}{each}"]
        weight_bits, kv_bits = (math.floor(10 * bits * (1 + self.free / nbytes)) / 10 for bits, nbytes in
                                ((self.weight_bits, self.weights), (self.kv_bits, self.cache)))
        memory = math.ceil((self.needed - self.reserve) / (1 - RESERVE))
        ways = [
            self.max_users and f"fewer users: at most {self.max_users:,}",
            self.max_context and f"a shorter context: at most {_tokens(self.max_context)} each",
            weight_bits >= FEWEST_BITS and f"smaller weights: at most {weight_bits:g} bits each",
            kv_bits >= FEWEST_BITS and f"a smaller KV cache: at most {kv_bits:g} bits for each number",
            f"a larger device: at least {_size(memory, math.ceil)}",
        ]
        ways = [f"  - {way}" for way in ways if way]
        return [f"It does not fit: {_size(-self.free)} are missing. It would with{' one of these' * (len(ways) > 1)}:",
                *ways]


def plan(shape: Shape, device: Device, weight_bits: float = 16, kv_bits: float = 16, *, context: int,
         users: int) -> Plan:
    """The memory and the least times of `users` sequences of `context` tokens each. Print it, or read its fields.

    Bits are 1 to 32 for each stored number, scales included (4.5). ValueError for anything else, and for a shape or a
    device that is not one. A plan that does not fit is no error: `fits` is False, and the text says what would.
    """
    return Plan(shape=shape, device=device, weight_bits=weight_bits, kv_bits=kv_bits, context=context, users=users)


def _most(fits: Callable[[int], bool]) -> int:
    """The largest n for which fits(n), which holds up to some n and for none beyond; 0 when it never does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _bits(name: str, bits: float) -> float:
    if not _is_number(bits) or not 1 <= bits <= 32:
        raise ValueError(f"{name} must be 1 to 32 bits for each number, not {bits!r}: 16 for bfloat16, 4.5 for int4 "
                         f"with its scales")
    return int(bits) if bits == int(bits) else float(bits)  # Python's numbers: numpy's would overflow


def _three(value: float) -> str:
    """Three digits that count, written out: 0.117, 1,200."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _size(nbytes: int, rounded: Callable[[Fraction], int] = round) -> str:
    """Both units, two digits behind the point. `rounded` is math.ceil for what must not be less."""
    gb, gib = (rounded(Fraction(100 * nbytes, unit)) / 100 for unit in (10**9, 2**30))
    return f"{gb:,.2f} GB ({gib:,.2f} GiB)"


def _seconds(seconds: float) -> str:
    return f"{_three(seconds)} s" if seconds >= 1 else f"{_three(seconds * 1e3)} ms"


def _users(count: int) -> str:
    return f"{count:,} user{'s' * (count != 1)}"


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"
