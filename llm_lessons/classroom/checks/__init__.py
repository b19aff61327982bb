"""One check for each exercise: `check.name(your_function)` prints *passed*, *not done yet*, or what is wrong."""

from .attention import attention_weights, causal_mask, grouped_attention, previous_token_score
from .embeddings import nearest, rotate_pairs, sinusoidal
from .next_token import rms_norm, swiglu, temperature, top_p, yours_or_ours
from .tokenization import bpe_encode, count_pairs, merge_pair, stream_pieces
