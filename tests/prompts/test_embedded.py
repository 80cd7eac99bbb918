import pytest

from megatron_rl.config.rules.method import CAPACITY
from megatron_rl.prompts.factory import EMBEDDED
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.split import draw_split


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CAPACITY)
def test_the_capacity_of_a_finite_task_is_what_its_generator_gives(name: str, seed: int) -> None:
    task = EMBEDDED[name]
    num_train, num_eval = CAPACITY[name]["data.num_train"][1], CAPACITY[name]["data.num_eval"][1]
    split = draw_split(task.questions(seed), num_train, num_eval)
    assert (len(split.train), len(split.held_out)) == (num_train, num_eval)
    for beyond in ((num_train + 1, num_eval), (num_train, num_eval + 1)):
        with pytest.raises(
            PromptDataError, match=f"gave only {num_train} training and {num_eval} held-out"
        ):
            draw_split(task.questions(seed), *beyond)
