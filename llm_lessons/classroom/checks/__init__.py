"""One check for each exercise: `check.name(your_function)` prints *passed*, *not done yet*, or what is wrong."""

from .attention import attention_weights, causal_mask, grouped_attention, previous_token_score
from .batching import admit, block_key, plan_step, within_limits
from .decode import bytes_per_step, ceiling, positions, recompute_flops
from .embeddings import nearest, rotate_pairs, sinusoidal
from .kv_cache import append, kv_bytes_per_token, window_mask, write
from .next_token import rms_norm, swiglu, temperature, top_p, yours_or_ours
from .prefill import intensity, least_time, prefill_flops, prefill_in_chunks
from .quantization import int8_product, pack_nibbles, q4_1_block, quantize_rows
from .sizing import cheapest, diagnose, users_that_fit
from .tokenization import bpe_encode, count_pairs, merge_pair, stream_pieces
