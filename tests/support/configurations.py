"""Configurations for tests: what they are checked against, and their refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused, Refusal, format_value

# The type of the fixture `make_checkpoint`.
MakeCheckpoint = Callable[..., Path]
NODE = LaunchFacts(world_size=8, local_world_size=8, num_gpus=16)
# Layouts of more ranks than a node has; see tests/config/test_published_models.py.
ON_CLUSTERS = {"pp2_ep8", "tp4_pp8_ep16"}
# engine.dtype follows model.dtype, and engines on GPUs take 16-bit numbers only.
BF16 = "model.dtype=bfloat16"


def accept(checkpoint: Path, *overrides: str, facts: LaunchFacts | None = None) -> Configuration:
    """Return the configuration of some overrides over a checkpoint."""
    return compose([f"model.path={checkpoint}", *overrides], facts=facts)


def refusals(
    checkpoint: Path, *overrides: str, facts: LaunchFacts | None = None
) -> tuple[Refusal, ...]:
    """Return the refusals of a configuration that must not be accepted."""
    with pytest.raises(ConfigurationRefused) as error:
        compose([f"model.path={checkpoint}", *overrides], facts=facts)
    return error.value.refusals


def assert_refused(
    checkpoint: Path, overrides: str | list[str], setting: str, fragment: str
) -> None:
    """Assert that some refusal names a setting, with a rule or remedy that has a fragment.

    overrides: separated by spaces, or a list where one of them has spaces itself. setting: key and
    value as the refusal shows them.
    """
    words = overrides.split(" ") if isinstance(overrides, str) else overrides
    results = refusals(checkpoint, *words)
    assert any(
        f"{refusal.key}={format_value(refusal.value)}" == setting
        and fragment in f"{refusal.rule} {refusal.remedy}"
        and refusal.remedy
        for refusal in results
    ), [str(refusal) for refusal in results]
