"""The course's widgets, by the lesson that shows them. Each carries a picture of its starting state."""

from .attention_explorer import attention_explorer
from .batching import timeline
from .core import Interactive
from .decode import step_timeline
from .embeddings import neighbour_finder, rope_dials
from .kv_cache import cache_growth
from .prefill import roofline_explorer
from .quantization import grid_explorer
from .sampling_playground import sampling_playground
from .sizing import planner
from .token_explorer import token_explorer
from .two_jobs import answer_stepper
