"""The course's pictures, by the lesson that shows them. Each function draws one and returns it; it shows nothing."""

from .attention import attention_maps, explorer_view, growth, head_scores, knock_out, scale_effect, slope
from .batching import batch_gain, load_curve, request_timeline, scenario_needs, token_gaps
from .decode import batch_steps, growing_time, step_bytes, step_parts, timeline, two_jobs_roofline
from .embeddings import neighbour_bars, position_vectors, rope_dial, similarities, wavelengths, word_map
from .engine import CONTEXT, engine_speed
from .kv_cache import (
    cache_speed,
    memory_growth,
    paged_blocks,
    weights_and_cache,
    window_loss,
    window_view,
)
from .next_token import draws, logit_lens, parameter_map, sampler_stages
from .prefill import roofline, time_and_bounds
from .quantization import error_by_bits, grid_view, key_channels, outlier_channels, quality_cliff, size_and_speed
from .sizing import (
    Batches,
    latency_throughput,
    memory_bars,
    plan_and_measured,
    training_and_inference,
    users_by_context,
)
from .tokenization import one_token_words, token_picture, tokens_of, tokens_per_character
from .two_jobs import Step, answer_step, token_times, two_passes
