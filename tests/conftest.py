"""What several test files share: the course's real model, loaded once, the path of its file, and a JupyterLab."""

import warnings

import pytest
from browser_tools import browser, lab, page  # noqa: F401 (fixtures of all test files, so that they share one server)
from hypothesis import HealthCheck, settings

import llm_lessons as ll
from llm_lessons.download import SMOLLM2

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture
def recwarn(recwarn):
    """pytest's own, blind to deprecated names that other packages use of each other: an old one's of a new one."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="(?!llm_lessons)")
    return recwarn


@pytest.fixture(scope="session")
def gguf_path():
    """The file that the course's model is read from; fetched once, then in the cache of this machine."""
    return SMOLLM2.fetch() / next(iter(SMOLLM2.files))


@pytest.fixture(scope="session")
def smollm2(gguf_path):
    """(model, tokenizer) of the course, float32. Shared by all tests of a session: do not change them."""
    return ll.load_pretrained(device="cpu")
