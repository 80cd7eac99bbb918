import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.prompts.embedded import EMBEDDED
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.split import draw_split


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [name for name, task in EMBEDDED.items() if task.capacity])
def test_the_capacity_of_a_finite_task_is_what_its_generator_gives(name: str, seed: int) -> None:
    task = EMBEDDED[name]
    assert task.capacity is not None
    num_train, num_eval = task.capacity.train, task.capacity.held_out
    split = draw_split(task.questions(seed), num_train, num_eval)
    assert (len(split.train), len(split.held_out)) == (num_train, num_eval)
    for beyond in ((num_train + 1, num_eval), (num_train, num_eval + 1)):
        with pytest.raises(PromptDataError, match=f"gave only {num_train} training and {num_eval} held-out"):
            draw_split(task.questions(seed), *beyond)


def test_looking_up_a_task_imports_neither_torch_nor_numpy() -> None:
    program = "import sys, megatron_rl.prompts.embedded; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[2]).returncode == 0
