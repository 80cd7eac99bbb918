"""Refusals of managed engines that are larger than a node, or of several sizes."""

from pathlib import Path

import pytest

from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.support.configurations import BF16, accept, refusals

MACHINE = LaunchFacts(world_size=1, local_world_size=1, num_gpus=2)
EXTERNAL = ("engine=external", "engine.urls=['http://127.0.0.1:3','http://127.0.0.1:4']")


def test_an_engine_larger_than_the_node_can_be_started_by_hand(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, BF16, "engine.tp=4", facts=MACHINE)
    assert refusal.key == "engine.tp"
    assert "2 GPU(s)" in refusal.rule
    assert "--nnodes" in refusal.remedy and "engine=external" in refusal.remedy
    assert accept(checkpoint, *EXTERNAL, BF16, "engine.tp=4", facts=MACHINE).engine.tp == 4


def test_engines_of_several_sizes_are_external(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, "engine.mixed_sizes=true")
    assert refusal.key == "engine.mixed_sizes" and "engine=external" in refusal.remedy
    assert accept(checkpoint, *EXTERNAL, "engine.mixed_sizes=true").engine.mixed_sizes


@pytest.mark.parametrize("option", ["--nnodes=2", "--node-rank=1", "--dist-init-addr=a:1"])
def test_options_of_several_nodes_name_external_engines(checkpoint: Path, option: str) -> None:
    (refusal,) = refusals(checkpoint, f"engine.extra_args=['{option}']")
    assert refusal.key == "engine.extra_args" and "engine=external" in refusal.rule


def test_experts_are_not_divided_on_cpus(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, "engine.tp=2", "engine.ep=2")
    assert refusal.key == "engine.ep" and "for CPUs" in refusal.rule
    assert accept(checkpoint, "engine.tp=2").engine.tp == 2
