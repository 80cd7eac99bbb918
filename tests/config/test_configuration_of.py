"""The cheap composition of the tests gives what Hydra's composition gives."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import configuration_of

CASES = [
    "",
    "experiment=quickstart parallel=ep2 model.dtype=bfloat16",
    "algo=espo algo.fractions=[0.5,0.5] experiment=smoke data=csv data.train_path=2026_11.csv",
    "experiment=smoke run.name=2026_11_21 run.root=1e3",
    "experiment=smoke reward.options={weights:[1,2]} +reward.options.key=3 reward=custom",
    "experiment=smoke train.total_steps=many optimizer.lr=-1",
    "experiment=smoke rollout.prompts=3 trian.total_steps=2",
    "experiment=smoke parallel.ep=3 rollout.temperature=0",
    "experiment=smoke parallel=none",
    "experiment=smoke engine.dtype=null ~data.seed",
    "experiment=smoke data=[a,b] logger=quiet",
    "experiment=smoke run.name=${oc.env:NO_SUCH_VARIABLE}",
]


def outcome(compose_them: Callable[..., Any], overrides: list[str]) -> Any:
    """Return the configuration, or the refusals as the user reads them."""
    facts = LaunchFacts(world_size=2, local_world_size=2)
    try:
        return compose_them(overrides, facts=facts)
    except ConfigurationRefused as error:
        return str(error)


@pytest.mark.parametrize(
    "case",
    [CASES[1], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != CASES[1])],
)
def test_composition_from_memory_equals_hydras(case: str) -> None:
    overrides = case.split()
    outcomes = [outcome(configuration_of, overrides) for _ in range(2)]
    assert outcomes == [outcome(compose, overrides)] * 2, "also the second time"
