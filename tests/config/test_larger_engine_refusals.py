"""Refusals of managed engines that are larger than a node."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.support.configurations import BF16, accept, refusals

MACHINE = LaunchFacts(world_size=1, local_world_size=1, num_gpus=2)
EXTERNAL = ("engine=external", "engine.urls=['http://127.0.0.1:3','http://127.0.0.1:4']")
ON_CPUS = LaunchFacts(world_size=4, local_world_size=1)
ON_GPUS = LaunchFacts(world_size=4, local_world_size=2, num_gpus=4)


def test_an_engine_larger_than_the_node_needs_several(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, BF16, "engine.tp=4", facts=MACHINE)
    assert refusal.key == "engine.tp"
    assert "2 GPU(s)" in refusal.rule
    assert "engine.nodes_per_engine" in refusal.remedy
    assert accept(checkpoint, *EXTERNAL, BF16, "engine.tp=4", facts=MACHINE).engine.tp == 4


@pytest.mark.parametrize(("facts", "dtype"), [(ON_CPUS, "float32"), (ON_GPUS, "bfloat16")])
def test_nodes_share_an_engine(checkpoint: Path, facts: LaunchFacts, dtype: str) -> None:
    settings = ("engine.tp=4", "engine.nodes_per_engine=2", f"model.dtype={dtype}")
    assert accept(checkpoint, *settings, facts=facts).engine.nodes_per_engine == 2


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        (["engine.tp=3", "engine.nodes_per_engine=3"], "engine.nodes_per_engine", "4 node(s)"),
        (["engine.nodes_per_engine=2"], "engine.nodes_per_engine", "engine.tp=1"),
        (["engine.tp=6", "engine.nodes_per_engine=4"], "engine.nodes_per_engine", "engine.tp=6"),
        (
            ["engine.tp=2", "engine.nodes_per_engine=2", "sync.transport=delta"],
            "sync.transport",
            "would not find them",
        ),
        (
            [*EXTERNAL, "engine.tp=2", "engine.nodes_per_engine=2"],
            "engine.nodes_per_engine",
            "external servers are already running",
        ),
    ],
)
def test_nodes_that_cannot_share_an_engine_are_refused(
    checkpoint: Path, overrides: list[str], key: str, rule: str
) -> None:
    results = refusals(checkpoint, *overrides, facts=ON_CPUS)
    assert any(r.key == key and rule in r.rule and r.remedy for r in results), results


def test_a_run_on_one_node_shares_no_engine(checkpoint: Path) -> None:
    results = refusals(checkpoint, "engine.tp=2", "engine.nodes_per_engine=2")
    (refusal,) = [r for r in results if r.key == "engine.nodes_per_engine"]
    assert "1 node(s)" in refusal.rule and "--nnodes" in refusal.remedy


def test_each_node_needs_gpus_for_its_part_of_an_engine(checkpoint: Path) -> None:
    settings = (BF16, "engine.tp=4", "engine.nodes_per_engine=2")
    (refusal,) = refusals(checkpoint, *settings, facts=replace(ON_GPUS, num_gpus=3))
    assert refusal.key == "engine.count"
    assert "2 trainer rank(s) and 2 engine process(es) of a node" in refusal.rule


@pytest.mark.parametrize("option", ["--nnodes=2", "--node-rank=1", "--dist-init-addr=a:1"])
def test_options_of_several_nodes_have_a_setting(checkpoint: Path, option: str) -> None:
    (refusal,) = refusals(checkpoint, f"engine.extra_args=['{option}']")
    assert refusal.key == "engine.extra_args" and "engine.nodes_per_engine" in refusal.rule


def test_experts_are_not_divided_on_cpus(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, "engine.tp=2", "engine.ep=2")
    assert refusal.key == "engine.ep" and "for CPUs" in refusal.rule
    assert accept(checkpoint, "engine.tp=2").engine.tp == 2
