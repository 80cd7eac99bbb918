from megatron_rl.config.schema import DataSettings, RolloutSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.selector import SelectionResult
from megatron_rl.prompts.selection.uniform import Uniform
from megatron_rl.prompts.source import PromptSource
from tests.support.groups import group

SETTINGS = RolloutSettings(max_new_tokens=8, prompts_per_step=3, samples_per_prompt=2)
POOL = [Prompt(id=str(i), token_ids=(i,), answer="1", task="t") for i in range(10)]


def make_selector() -> Uniform:
    return Uniform(PromptSource(POOL, POOL, DataSettings(source="column_addition")), SETTINGS)


def test_one_round_of_different_prompts() -> None:
    requests = make_selector().select(1).first_round()
    assert [request.index for request in requests] == [0, 1, 2]
    assert {(request.samples, request.first_sample) for request in requests} == {(2, 0)}
    assert len({request.prompt.id for request in requests}) == 3


def test_all_groups_are_credited_in_the_order_of_their_indices() -> None:
    step = make_selector().select(1)
    step.first_round()
    groups = [group(1.0, 0.0, name=f"g{i}") for i in range(3)]
    for index in (2, 0, 1):
        assert step.handle_group(index, groups[index]) is None
    assert step.next_round() == []
    assert step.result() == SelectionResult(tuple(groups))
    assert step.metrics() == {}


def test_a_resumed_run_makes_the_same_choices() -> None:
    selector = make_selector()
    for step in (1, 2):
        selector.select(step).first_round()
    resumed_selector = make_selector()
    resumed_selector.restore(selector.state())
    for step in (3, 4):
        requests = selector.select(step).first_round()
        assert resumed_selector.select(step).first_round() == requests
