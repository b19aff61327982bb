"""Helpers of the course "LLM inference, lesson by lesson": `import llm_lessons as ll`.

Importing this fetches nothing, sets nothing, and needs neither Jupyter nor matplotlib.
"""

from .batching import Engine, Step
from .bpe import BPETokenizer
from .capacity import SHAPES, Shape, ridge_point, roofline_time
from .devices import DEVICES, Device
from .download import DownloadError, cache_folder
from .generate import Generation, decode, generate, keep_shared_prefix, prefill
from .gpt2 import gpt2_ranks, gpt2_tokenizer
from .kv_cache import Cache, GrowingCache, KVCache
from .model import Model, ModelConfig
from .packed_linear import Int4Linear, Int8Linear, PackedLinear, quantize_model
from .paged_cache import BlockPool, BlockTable, PagedCache
from .planner import Plan, decode_step_time, plan, prefill_servers
from .pretrained import load_pretrained, load_tokenizer
from .prose import course_prose
from .quality import (
    QUESTIONS,
    Comparison,
    Estimate,
    Score,
    ask,
    bits_per_weight,
    bootstrap,
    compare,
    count_right,
    score,
    simulate,
)
from .quantize import QuantizedTensor, pack, quantize, unpack
from .quantized_cache import QuantizedCache
from .request import Request
from .sampling import Sampler
from .simulation import CostModel, RooflineCost, simulated_engine
from .sliding_cache import SlidingCache
from .timing import (
    Roofline,
    Timing,
    available_cpus,
    best_device,
    in_turns,
    measure_roofline,
    set_threads,
    stopwatch,
    synchronize,
    timed,
)
from .tokenizer import Tokenizer, stream_text
from .trace import Trace, operations, trace
from .traffic import SCENARIOS, Arrival, Report, Scenario, arrivals, serve
from .training import training_flops, training_memory

__version__ = "0.1.0"
