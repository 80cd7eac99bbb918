"""Worked examples of the embedded tasks, for the supervised stage that comes before reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.embedded import EMBEDDED
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.split import draw_split


@dataclass(frozen=True)
class WorkedExample:
    """prompt_ids, response_ids: token ids; the response ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    answer: str


def worked_examples(
    source: str, tokenizer: Tokenizer, *, num_train: int | None = None, seed: int = 0
) -> list[WorkedExample]:
    """`num_train` training examples of an embedded task (None: its usual number), in the order of `seed`."""
    if source not in EMBEDDED:
        raise PromptDataError(
            f"data.source={source}: no worked responses to learn from. Choose one of {', '.join(EMBEDDED)}"
        )
    if not tokenizer.eos_ids:
        raise PromptDataError("model.path: the tokenizer has no end-of-sequence token to end worked responses with")
    task = EMBEDDED[source]
    wanted = task.num_train if num_train is None else num_train
    return [
        WorkedExample(
            prompt_ids=tokenizer.encode(question.text),
            response_ids=(*tokenizer.encode(question.target or ""), tokenizer.eos_ids[0]),
            answer=question.answer,
        )
        for question in draw_split(task.questions(seed), wanted, 0).train
    ]
