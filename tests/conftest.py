"""Settings shared by every test: hypothesis profiles, and no network or GPU by accident."""

import os

import hypothesis
import pytest

# Set before anything imports torch or transformers: two cores are shared by every process a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

hypothesis.settings.register_profile("default", max_examples=25, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

HEAVY = {"engine", "distributed", "chaos", "slow"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with heavy tests first, the one with most of them foremost: then no worker ends long after the others."""
    heavy: dict[str, int] = {}
    for item in items:
        file = str(item.path)
        heavy[file] = heavy.get(file, 0) + any(mark.name in HEAVY for mark in item.iter_markers())
    items.sort(key=lambda item: -heavy[str(item.path)])
