"""Refusals of engines that share devices with the trainer."""

from pathlib import Path

import pytest

from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.support.configurations import BF16, accept, assert_refused, refusals

ON_GPUS = LaunchFacts(world_size=4, local_world_size=4, num_gpus=4)
COLOCATED = ("engine.colocated=true", "parallel=ep2", BF16)
IPC = "sync.transport=ipc"
KEY = "engine.colocated"


@pytest.mark.parametrize(("count", "tp"), [(4, 1), (2, 2), (1, 4)])
def test_engines_that_cover_the_gpus_of_a_node_are_accepted(
    checkpoint: Path, count: int, tp: int
) -> None:
    sizes = (f"engine.count={count}", f"engine.tp={tp}")
    assert accept(checkpoint, *COLOCATED, IPC, *sizes, facts=ON_GPUS).engine.colocated


@pytest.mark.parametrize(("count", "tp"), [(1, 1), (3, 1), (2, 4)])
def test_engines_that_do_not_cover_the_gpus_of_a_node_are_refused(
    checkpoint: Path, count: int, tp: int
) -> None:
    sizes = (f"engine.count={count}", f"engine.tp={tp}")
    (refusal,) = refusals(checkpoint, *COLOCATED, IPC, *sizes, facts=ON_GPUS)
    assert refusal.key == "engine.count" and f"need {count * tp}" in refusal.rule
    assert "engine.count=4 engine.tp=1" in refusal.remedy


def test_more_ranks_than_gpus_are_refused(checkpoint: Path) -> None:
    facts = LaunchFacts(world_size=4, local_world_size=4, num_gpus=2)
    (refusal,) = refusals(checkpoint, *COLOCATED, IPC, "engine.count=4", facts=facts)
    assert refusal.key == KEY and "--nproc-per-node 2" in refusal.remedy


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_another_transport_is_refused_on_gpus(checkpoint: Path, transport: str) -> None:
    overrides = (*COLOCATED, f"sync.transport={transport}", "engine.count=4")
    (refusal,) = refusals(checkpoint, *overrides, facts=ON_GPUS)
    assert refusal.key == "sync.transport" and IPC in refusal.remedy


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_on_cpus_weights_travel_as_usual(checkpoint: Path, transport: str) -> None:
    c = accept(checkpoint, "engine.colocated=true", f"sync.transport={transport}")
    assert c.engine.colocated


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "a:1, expandable_segments: true"])
def test_segments_that_grow_are_refused_with_ipc(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Torch reads both variables."""
    monkeypatch.setenv(variable, value)
    (refusal,) = refusals(checkpoint, *COLOCATED, IPC, "engine.count=4", facts=ON_GPUS)
    assert refusal.key == "sync.transport"
    assert refusal.remedy == f"Remove expandable_segments from {variable}"


@pytest.mark.parametrize(
    ("overrides", "setting", "fragment"),
    [
        (f"{KEY}=true {IPC}", "sync.transport=ipc", "run on CPUs"),
        (IPC, "sync.transport=ipc", f"{KEY} is false"),
        (f"{KEY}=true rollout.max_staleness=1", "rollout.max_staleness=1", "No engine samples"),
        (f"{KEY}=true engine.nodes_per_engine=2", "engine.nodes_per_engine=2", "of one node"),
        (
            f"{KEY}=true environment=demonstration algo=sft",
            "environment.name=demonstration",
            "lost its weights",
        ),
        (f"{KEY}=true mode=rollout_only", f"{KEY}=true", "Only mode=train"),
        (
            f"{KEY}=true engine.extra_args=['--mem-fraction-static=0.5']",
            "engine.extra_args=['--mem-fraction-static=0.5']",
            "plans the memory",
        ),
        (
            f"{KEY}=true engine=external engine.urls=[http://10.0.0.7:30000]",
            f"{KEY}=true",
            "already running",
        ),
        (f"{KEY}=true {IPC} engine.quantization=fp8", "engine.quantization=fp8", "hides errors"),
    ],
)
def test_a_combination_is_refused(
    checkpoint: Path, overrides: str, setting: str, fragment: str
) -> None:
    assert_refused(checkpoint, overrides, setting, fragment)
