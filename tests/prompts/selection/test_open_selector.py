"""Opening the prompt selector that `selection.name` chooses."""

import pytest

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.oversample import Oversample
from megatron_rl.prompts.selection.selector import Selector
from megatron_rl.prompts.selection.uniform import Uniform
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play

POOL = make_pool(40)
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=4, samples_per_prompt=2)


def open_by_name(name: str, *, seed: int = 0, budget: float = 1.0) -> Selector:
    source = PromptSource(POOL, POOL[:1], DataSettings(source="column_addition"))
    return open_selector(source, ROLLOUT, SelectionSettings(name=name, budget=budget), seed=seed)


@pytest.mark.parametrize(
    ("name", "selector_class"),
    [("uniform", Uniform), ("oversample", Oversample), ("belief", BeliefSelector)],
)
def test_each_name_opens_its_selector(name: str, selector_class: type) -> None:
    selector = open_by_name(name)
    assert isinstance(selector, selector_class)
    rounds, _ = play(selector.select(1), lambda prompt, sample: 0.0)
    assert [request.samples for request in rounds[0]] == [2] * 4
    assert selector.state().prompts.position == 4


def test_oversample_gets_its_budget() -> None:
    rounds, _ = play(open_by_name("oversample", budget=3.0).select(1), lambda prompt, sample: 0.0)
    assert len(rounds) == 3


def test_belief_gets_the_seed_of_the_run() -> None:
    selector = open_by_name("belief", seed=7)
    assert isinstance(selector, BeliefSelector)
    assert selector.seed == 7
