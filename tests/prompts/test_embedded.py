import pytest

from megatron_rl.config.rules.data import CAPACITY
from megatron_rl.prompts.factory import EMBEDDED
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.split import split_generator


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CAPACITY)
def test_capacity_of_a_finite_task_is_that_of_its_generator(name: str, seed: int) -> None:
    task = EMBEDDED[name]
    num_train = CAPACITY[name]["data.num_train"][1]
    num_eval = CAPACITY[name]["data.num_eval"][1]
    split = split_generator(task.questions(seed), num_train, num_eval)
    assert (len(split.train), len(split.held_out)) == (num_train, num_eval)
    words = f"only {num_train} training and {num_eval} held-out"
    for too_many in ((num_train + 1, num_eval), (num_train, num_eval + 1)):
        with pytest.raises(PromptDataError, match=words):
            split_generator(task.questions(seed), *too_many)
