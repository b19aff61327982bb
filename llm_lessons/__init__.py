"""Helpers of the course "LLM inference, lesson by lesson": `import llm_lessons as ll`.

Importing this fetches nothing, sets nothing, and needs neither Jupyter nor matplotlib.
"""

from .download import DownloadError, cache_folder
from .generate import Generation, decode, generate, keep_shared_prefix, prefill
from .kv_cache import KVCache
from .model import Model, ModelConfig
from .pretrained import load_pretrained
from .sampling import Sampler
from .timing import Timing, available_cpus, best_device, set_threads, stopwatch, synchronize, timed
from .tokenizer import Tokenizer, stream_text
from .trace import Trace, trace

__version__ = "0.1.0"
