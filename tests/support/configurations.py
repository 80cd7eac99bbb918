"""Configurations for tests: what they are checked against, and their refusals."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from megatron_rl.config.check import check_configuration
from megatron_rl.config.cli import HYDRA_CONF, compose
from megatron_rl.config.keys import register
from megatron_rl.config.overrides import parse_override, quote_text
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


def configuration_of(
    overrides: Sequence[str] = (), *, facts: LaunchFacts | None = None
) -> Configuration:
    """Return what `compose` returns, but let Hydra compose once for each choice of groups.

    A composition takes Hydra 0.2 s. Here the values are set on a copy of the tree, and the checks
    are the same. Whatever is not a group's option or the value of an existing key, such as a
    mistake for which Hydra itself has a message, is left to `compose`.
    """
    try:
        tree = _tree_from_memory(overrides)
    except Exception:  # Hydra's own errors, OmegaConf's, or what the parser cannot read
        return compose(overrides, facts=facts)
    choices = _composition(_groups_of(overrides))[1]
    return check_configuration(
        tree, choices, facts or LaunchFacts(), overrides, recompose=_tree_from_memory
    )


def _tree_from_memory(overrides: Sequence[str]) -> DictConfig:
    """Return the tree of some overrides, set on a copy of the composition of their groups."""
    groups = _groups_of(overrides)
    tree = copy.deepcopy(_composition(groups)[0])
    for text in overrides:
        if text in groups:
            continue
        override: Any = parse_override(quote_text(text))
        is_plain = not override.is_add() and not override.is_delete() and override.package is None
        if not is_plain or override.is_sweep_override():
            raise ValueError(text)
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
    return tree


def _groups_of(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that choose the option of a group."""
    return tuple(text for text in overrides if (HYDRA_CONF / text.partition("=")[0]).is_dir())


@functools.cache
def _composition(groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, str | None]]:
    """Return Hydra's tree for the options of some groups, and the option of each group."""
    register()
    with hydra.initialize_config_dir(str(HYDRA_CONF), version_base="1.3"):
        tree = hydra.compose("train_rl", [*groups], return_hydra_config=True)
    choices = dict(tree.hydra.runtime.choices)
    with open_dict(tree):
        del tree["hydra"]
    return tree, choices


def accept(checkpoint: Path, *overrides: str, facts: LaunchFacts | None = None) -> Configuration:
    """Return the configuration of some overrides over a checkpoint."""
    return configuration_of([f"model.path={checkpoint}", *overrides], facts=facts)


def refusals(
    checkpoint: Path, *overrides: str, facts: LaunchFacts | None = None
) -> tuple[Refusal, ...]:
    """Return the refusals of a configuration that must not be accepted."""
    with pytest.raises(ConfigurationRefused) as error:
        configuration_of([f"model.path={checkpoint}", *overrides], facts=facts)
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
