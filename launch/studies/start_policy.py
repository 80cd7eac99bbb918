"""How often the shipped checkpoint of column addition solves questions, sampled with transformers
in float32.

The tables of docs/data.md (a few minutes on one core):  PYTHONPATH=.:kernels:tests python -m
support.start_policy
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import islice

import torch
from transformers import AutoModelForCausalLM

from launch.testbed.policies import COLUMN_ADDITION
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts import column_addition_mixed
from megatron_rl.prompts.question import Question
from megatron_rl.rewards.exact_match import ExactMatch

END, MOST_NEW_TOKENS = 1, 32


class StartPolicy:
    """Samples at temperature 1, `most_new_tokens` at most, and judges by the last number."""

    def __init__(self, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            COLUMN_ADDITION, dtype=torch.float32
        ).eval()
        self._tokenizer = Tokenizer.from_directory(COLUMN_ADDITION)
        self._random = torch.Generator().manual_seed(seed)
        self._reward = ExactMatch("last_number")

    def pass_rates(self, questions: Sequence[Question], samples: int) -> list[float]:
        """Of each question. All texts have one length, so that a batch needs no padding."""
        rows = self._sample([question.text for question in questions], samples)
        judged = [self._right(questions[i // samples], row) for i, row in enumerate(rows)]
        return [sum(judged[i : i + samples]) / samples for i in range(0, len(judged), samples)]

    @torch.inference_mode()
    def likelihoods(self, questions: Sequence[Question]) -> list[float]:
        """Of each question's worked response: its pass rate, but for other responses with the right
        total.
        """
        tokens = torch.tensor(
            [(*self._tokenizer.encode(q.text + q.demonstration), END) for q in questions]
        )
        logprobs = (
            self._model(tokens)
            .logits.log_softmax(-1)[:, :-1]
            .gather(-1, tokens[:, 1:, None])[..., 0]
        )
        return logprobs[:, len(questions[0].text) - 1 :].sum(1).exp().tolist()

    @torch.inference_mode()
    def _sample(self, texts: Sequence[str], samples: int) -> list[list[int]]:
        prompts = torch.tensor([self._tokenizer.encode(text) for text in texts]).repeat_interleave(
            samples, 0
        )
        output = self._model(prompts, use_cache=True)
        drawn: list[torch.Tensor] = []
        for _ in range(MOST_NEW_TOKENS):
            drawn.append(
                torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=self._random)
            )
            if (torch.cat(drawn, 1) == END).any(1).all():
                break
            output = self._model(drawn[-1], past_key_values=output.past_key_values, use_cache=True)
        return torch.cat(drawn, 1).tolist()

    def _right(self, question: Question, row: list[int]) -> float:
        if END not in row:
            return 0.0
        text = self._tokenizer.decode(row[: row.index(END)])
        prompt = Prompt(id=question.id, token_ids=(), answer=question.answer, task=question.task)
        return asyncio.run(self._reward.score(prompt, text, FinishReason.STOP)).correctness or 0.0


def by_length(num: int, seed: int = 0) -> dict[int, list[Question]]:
    """`num` questions of each difficulty, by the number of their digits."""
    drawn = islice(column_addition_mixed.questions(seed), 3 * num)
    kinds: dict[int, list[Question]] = {4: [], 5: [], 6: []}
    for question in drawn:
        kinds[int(question.difficulty[0])].append(question)
    return kinds


def by_carries(digits: int, num: int) -> list[list[Question]]:
    """`num` questions of column_addition's kind with 0, 1, ... `digits` carries."""
    rng = random.Random(0)
    found: list[list[Question]] = [[] for _ in range(digits + 1)]
    while min(map(len, found)) < num:
        lower = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(digits - 1)]
        question = column_addition_mixed.question([*lower, (rng.randint(1, 9), rng.randint(1, 9))])
        found[int(question.difficulty.split("_")[2])].append(question)
    return [questions[:num] for questions in found]


def shares(rates: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean rate; the shares of questions at 95 % and above, from 20 to 70 %, at 2 % and below."""
    n = len(rates)
    bands = ((0.95, 1.0), (0.2, 0.7), (0.0, 0.02))
    high, middle, low = (sum(a <= rate <= b for rate in rates) / n for a, b in bands)
    return sum(rates) / n, high, middle, low


def main() -> None:
    policy = StartPolicy(seed=0)
    print(
        "column_addition, mean likelihood of the worked response of 100 questions: digits, 0 carries, 1 carry, ..."
    )
    for digits in range(3, 7):
        cells = [policy.likelihoods(questions) for questions in by_carries(digits, 100)]
        print(digits, " ".join(f"{sum(cell) / len(cell):.2f}" for cell in cells))
    print(
        "column_addition_mixed: digits, what, mean, at 95 % and above, 20 to 70 %, at 2 % and below"
    )
    for digits, questions in by_length(1000).items():
        likely = [
            x for i in range(0, 1000, 100) for x in policy.likelihoods(questions[i : i + 100])
        ]
        rates = [
            x for i in range(0, 200, 10) for x in policy.pass_rates(questions[i : i + 10], 128)
        ]
        for what, values in (("likelihood of 1000", likely), ("rate in 128 samples of 200", rates)):
            print(digits, what, *(f"{share:.3f}" for share in shares(values)), flush=True)


if __name__ == "__main__":
    main()
