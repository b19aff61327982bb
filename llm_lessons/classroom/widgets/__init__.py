"""The course's widgets, by the lesson that shows them. Each carries a picture of its starting state."""

from .core import Interactive
from .two_jobs import answer_stepper
