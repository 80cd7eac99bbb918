from megatron_rl.config.schema import DataSettings, RolloutSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.selector import SelectionResult
from megatron_rl.prompts.selection.uniform import Uniform
from megatron_rl.prompts.source import PromptSource
from tests.support.groups import group

SETTINGS = RolloutSettings(max_new_tokens=8, prompts_per_step=3, samples_per_prompt=2)
POOL = [Prompt(id=str(i), token_ids=(i,), answer="1", task="t") for i in range(10)]


def selector() -> Uniform:
    return Uniform(PromptSource(POOL, POOL, DataSettings(source="column_addition")), SETTINGS)


def test_one_round_of_different_prompts_and_all_their_groups_in_order() -> None:
    step = selector().select(1)
    asks = step.begin()
    assert [(ask.index, ask.samples, ask.first_sample) for ask in asks] == [
        (0, 2, 0),
        (1, 2, 0),
        (2, 2, 0),
    ]
    assert len({ask.prompt.id for ask in asks}) == 3
    groups = [group(1.0, 0.0, name=f"g{i}") for i in range(3)]
    assert all(step.answered(i, groups[i]) is None for i in (2, 0, 1)) and step.more() == []
    assert step.result() == SelectionResult(tuple(groups)) and step.metrics() == {}


def test_a_resumed_run_asks_what_one_that_was_never_stopped_asks() -> None:
    whole, first = selector(), selector()
    for step in (1, 2):
        assert whole.select(step).begin() == first.select(step).begin()
    resumed = selector()
    resumed.restore(first.state())
    assert [whole.select(step).begin() for step in (3, 4)] == [
        resumed.select(step).begin() for step in (3, 4)
    ]
