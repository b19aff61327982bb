"""Lesson 07: what a cache saves, what it holds, who sees what through a window, and where the blocks of a pool lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from ...capacity import Shape
from ..style import COLORS, Picture, footnote, label_axes, picture

LINES = ("-", "--", ":", "-.")
CACHE, PALE, DARK = COLORS["kv_cache"], "#8FD3BE", "#00573F"  # the cache's colour, a paler and a darker one
NUMBERS = StrMethodFormatter("{x:,.9g}")  # 0.01, 100,000


def cache_speed(without: Sequence[float], with_cache: Sequence[float], speedups: dict[int, tuple[float, float]],
                note: str = "") -> Picture:
    """Seconds of each new token without and with a cache; and for N new tokens the speed-up (predicted, measured)."""
    alt = (f"without a cache a token takes {without[0] * 1e3:.0f} ms at first and {without[-1] * 1e3:.0f} ms at last, "
           f"with a cache {with_cache[1] * 1e3:.0f} and {with_cache[-1] * 1e3:.0f} ms. Speed-up: "
           + "; ".join(f"{n} tokens {measured:.1f} times, predicted {predicted:.1f}"
                       for n, (predicted, measured) in speedups.items()))
    with picture(alt, 1, 2, height=3.6, width_ratios=[1.3, 1]) as (figure, (left, right)):
        for seconds, color, line, label in ((without, COLORS["prefill"], "o", "without: reads the whole text again"),
                                            (with_cache, CACHE, "s", "with a cache: reads one token")):
            left.plot(range(1, len(seconds) + 1), [1e3 * s for s in seconds], line, color=color, markersize=3,
                      label=label)
        left.set_ylim(0, 1.25e3 * max(sorted(without)[-2], with_cache[0]))  # one odd token must not flatten the rest
        left.legend(loc="upper left")
        label_axes(left, "new token", "time (ms)", "each token's time")
        places = range(len(speedups))
        predicted, measured = zip(*speedups.values())
        right.bar([p - 0.2 for p in places], predicted, 0.38, color="white", edgecolor=COLORS["neutral"], hatch="//",
                  label="predicted")
        bars = right.bar([p + 0.2 for p in places], measured, 0.38, color=CACHE, label="measured")
        right.bar_label(bars, [f"{m:.1f}" if m < 10 else f"{m:.0f}" for m in measured])
        right.set_xticks(places, [f"{n}" for n in speedups])
        right.set_ylim(0, 1.15 * max(*predicted, *measured))
        right.legend(loc="upper left")
        right.grid(False, axis="x")
        label_axes(right, "new tokens", "times as fast as without", "speed-up for the whole text")
        footnote(figure, note)
    return figure


def memory_growth(tokens: Sequence[int], held: dict[str, Sequence[int]]) -> Picture:
    """Bytes that each kind of cache takes while a text grows: name -> bytes at each of the token counts."""
    alt = "memory of a cache; " + "; ".join(
        f"{name}: {sizes[0] / 1e6:.1f} MB at {tokens[0]:,} tokens, {sizes[-1] / 1e6:.1f} MB at {tokens[-1]:,}"
        for name, sizes in held.items())
    with picture(alt, height=3.4) as (figure, axis):
        _memory(axis, tokens, held)
    return figure


def _memory(axis: Axes, tokens: Sequence[int], held: dict[str, Sequence[int]]) -> None:
    for (name, sizes), line in zip(held.items(), LINES):
        axis.plot(tokens, [size / 1e6 for size in sizes], line, color=CACHE, linewidth=2, label=name)
    axis.set_ylim(0, 1.35e-6 * max(max(sizes) for sizes in held.values()))
    axis.set_xlim(0, tokens[-1])
    axis.xaxis.set_major_formatter(NUMBERS)
    axis.legend(loc="upper left")
    label_axes(axis, "tokens of text", "memory (MB, 10^6 bytes)", "memory of the cache")


def window_view(mask: Tensor, tokens: Sequence[int], held: dict[str, Sequence[int]]) -> Picture:
    """Left, which keys [queries, keys] each query of a short text sees; right, the memory while a text grows."""
    seen = mask.sum(-1)
    alt = (f"each of {len(mask)} tokens sees itself and up to {int(seen.max()) - 1} before it; memory: " + "; ".join(
        f"{name} {sizes[-1] / 1e6:.1f} MB at {tokens[-1]:,} tokens" for name, sizes in held.items()))
    with picture(alt, 1, 2, height=3.9, width_ratios=[1, 1.3]) as (figure, (left, right)):
        shades = ListedColormap(["#FFFFFF", "#F0F0F0", COLORS["attention"]])  # later, out of the window, seen
        past = Tensor.tril(mask.new_ones(mask.shape))
        left.imshow((past.int() + mask.int()).cpu().numpy(), cmap=shades, vmin=0, vmax=2)
        for row in range(len(mask)):
            for column in range(row + 1):
                if not mask[row, column]:
                    left.text(column, row, "×", ha="center", va="center", color=COLORS["neutral"])
        left.grid(False)
        left.xaxis.get_major_locator().set_params(integer=True)
        left.yaxis.get_major_locator().set_params(integer=True)
        label_axes(left, "position of the key", "position of the query", "seen (pink), out of the window (×)")
        _memory(right, tokens, held)
    return figure


def window_loss(full: float, alone: dict[int, float], with_first: dict[int, float]) -> Picture:
    """Loss with windows of several lengths: without and with the text's first token kept; `full`: all keys seen."""
    alt = f"loss {full:.1f} nats with all keys; " + "; ".join(
        f"window {w}: {loss:.1f}, with the first token kept {with_first[w]:.1f}" for w, loss in alone.items())
    with picture(alt, height=3.4) as (figure, axis):
        for shift, losses, color, label in ((-0.2, alone, COLORS["mistake"], "the window alone"),
                                            (0.2, with_first, COLORS["attention"], "the window and the first token")):
            bars = axis.bar([place + shift for place in range(len(losses))], losses.values(), 0.38, color=color,
                            label=label)
            axis.bar_label(bars, [f"{loss:.1f}" for loss in losses.values()])
        axis.axhline(full, color="black", linewidth=1)
        axis.text(len(alone) + 0.15, full, f"all keys: {full:.1f} ", ha="right", va="bottom")
        axis.set_xticks(range(len(alone)), [f"{w}" for w in alone])
        axis.set_xlim(-0.6, len(alone) + 0.15)
        axis.set_ylim(0, 1.3 * max(alone.values()))
        axis.grid(False, axis="x")
        axis.legend(loc="upper center", ncols=2)
        label_axes(axis, "window (tokens)", "loss (nats per token)", "loss on the last tokens of the text")
    return figure


def paged_blocks(tables: dict[str, tuple[Sequence[int], int]], blocks: int, block_size: int) -> Picture:
    """Where sequences lie in a pool: name -> (its blocks in order, tokens it holds); blocks count from 1."""
    users = {block: [name for name, (held, _) in tables.items() if block in held] for block in range(1, blocks + 1)}
    filled = {block: min(block_size, tokens - block_size * at)
              for held, tokens in tables.values() for at, block in enumerate(held)}
    shared = [block for block, names in users.items() if len(names) > 1]
    alt = "; ".join(f"{name}: {tokens} tokens in blocks {', '.join(map(str, held))}"
                    for name, (held, tokens) in tables.items())
    alt += f"; shared: {', '.join(map(str, shared)) or 'none'}; free: {sum(not names for names in users.values())}"
    with picture(alt, height=0.75 * len(tables) + 1.3) as (figure, axis):
        top = 1.2 * len(tables) + 0.3
        for row, (name, (held, tokens)) in enumerate(tables.items()):
            y = top - 1.2 * row
            axis.text(-0.15, y + 0.4, f"{name}\n{tokens} tokens", ha="right", va="center")
            for at, block in enumerate(held):
                _block(axis, at, y, block_size, filled[block], _shade(users[block], tables))
                axis.text(at + 0.45, y + 0.4, f"block {block}", ha="center", va="center", color=_ink(users[block]))
        axis.text(-0.15, 0.4, "the pool", ha="right", va="center", fontweight="bold")
        for block, names in users.items():
            _block(axis, block - 1, 0, block_size, filled.get(block, 0), _shade(names, tables))
            axis.text(block - 0.55, 0.4, f"{block}", ha="center", va="center", color=_ink(names))
            whose = "both" if len(names) == len(tables) == 2 else " and ".join(names)
            axis.text(block - 0.55, -0.12, whose or "free", ha="center", va="top", fontsize=9,
                      color="black" if names else COLORS["neutral"])
        axis.set(xlim=(-1.6, max(blocks, 1)), ylim=(-0.5, top + 1))
        axis.set_axis_off()
    return figure


def _shade(names: Sequence[str], tables: dict) -> str:
    if len(names) > 1:
        return DARK
    return (CACHE, PALE)[list(tables).index(names[0]) % 2] if names else "white"


def _ink(names: Sequence[str]) -> str:
    return "white" if len(names) > 1 else "black"


def _block(axis: Axes, x: float, y: float, size: int, filled: int, color: str) -> None:
    """A block of `size` slots, the first `filled` of them coloured."""
    for slot in range(size):
        axis.add_patch(Rectangle((x + 0.9 * slot / size, y), 0.9 / size, 0.8, linewidth=0.6, edgecolor="#BBBBBB",
                                 facecolor=color if slot < filled else "white"))
    axis.add_patch(Rectangle((x, y), 0.9, 0.8, fill=False, linewidth=1.2))


def gigabytes(nbytes: float) -> str:
    """A size in both units, to three digits: 5.37 GB (5.00 GiB)."""
    return f"{_three(nbytes / 1e9)} GB ({_three(nbytes / 2**30)} GiB)"


def _three(value: float) -> str:
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def weights_and_cache(name: str, shape: Shape, context: int, users: int, bytes_per_value: float,
                      bytes_per_weight: float = 2) -> Picture:
    """Memory of the weights and of all users' caches; and the caches against the context: where they cross."""
    weights = shape.parameters * bytes_per_weight
    token = shape.kv_bytes_per_token(bytes_per_value)
    cache = token * context * users
    crossing = weights / token / users
    alt = (f"{name}: weights {gigabytes(weights)}; {token:,.0f} bytes of cache per token; {users} "
           f"{'user' if users == 1 else 'users'} with {context:,} tokens each: {gigabytes(cache)}; the cache outweighs "
           f"the weights from {math.ceil(crossing):,} tokens each")
    with picture(alt, 1, 2, height=3.3, width_ratios=[1, 1.1]) as (figure, (left, right)):
        bars = left.bar(["weights", "cache"], [weights / 1e9, cache / 1e9], color=[COLORS["weights"], CACHE], width=0.6)
        left.bar_label(bars, [gigabytes(weights).replace(" (", "\n("), gigabytes(cache).replace(" (", "\n(")])
        left.set_ylim(0, 1.3 * max(weights, cache) / 1e9)
        left.grid(False, axis="x")
        left.yaxis.set_major_formatter(NUMBERS)
        label_axes(left, "", "memory (GB, 10^9 bytes)", name)
        contexts = [2**power for power in range(8, 20)]
        right.loglog(contexts, [token * users * c / 1e9 for c in contexts], color=CACHE,
                     label=f"cache of {users} {'user' if users == 1 else 'users'}")
        right.axhline(weights / 1e9, color=COLORS["weights"], linestyle="--", label="weights")
        right.plot(context, cache / 1e9, "o", color=CACHE, markersize=8)
        right.set_xticks(contexts[::2], [f"{c}" if c < 1024 else f"{c // 1024}k" for c in contexts[::2]])
        right.minorticks_off()
        right.yaxis.set_major_formatter(NUMBERS)
        right.set_ylim(top=20 * max(weights / 1e9, token * users * contexts[-1] / 1e9))
        right.legend(loc="upper left")
        label_axes(right, "context of each user (tokens, log scale)", "memory (GB, log scale)",
                   f"equal from {math.ceil(crossing):,} tokens each")
    return figure
