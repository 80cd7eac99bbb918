"""Measure how often the shipped checkpoint of column addition answers questions correctly.

Start it in the root of the repository (a few minutes on one core):

    python -m tests.lab.start_policy

It samples with transformers in float32. Output: the two tables of docs/data.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from itertools import islice

import torch
from transformers import AutoModelForCausalLM

from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts import column_addition_mixed
from megatron_rl.rewards.exact_match import ExactMatch
from tests.support.policies import COLUMN_ADDITION

END = 1  # token
MAX_NEW_TOKENS = 32


class StartPolicy:
    """The shipped checkpoint at temperature 1, judged by the last number of a response."""

    def __init__(self, seed: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(COLUMN_ADDITION, dtype=torch.float32)
        self._model = model.eval()
        self._tokenizer = Tokenizer.from_directory(COLUMN_ADDITION)
        self._random = torch.Generator().manual_seed(seed)
        self._reward = ExactMatch("last_number")

    def pass_rates(self, questions: Sequence[Question], samples: int) -> list[float]:
        """Estimate the pass rate of each question.

        All texts must have the same length, so that a batch needs no padding.
        """
        rows = self._sample([question.text for question in questions], samples)
        scores = [self._score(questions[i // samples], row) for i, row in enumerate(rows)]
        return [sum(scores[i : i + samples]) / samples for i in range(0, len(scores), samples)]

    @torch.inference_mode()
    def likelihoods(self, questions: Sequence[Question]) -> list[float]:
        """The likelihood of each question's worked response.

        It is the pass rate, except for other responses with the correct total.
        """
        texts = [question.text + question.demonstration for question in questions]
        tokens = torch.tensor([(*self._tokenizer.encode(text), END) for text in texts])
        logprobs = self._model(tokens).logits.log_softmax(-1)[:, :-1]
        token_logprobs = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
        first = len(questions[0].text) - 1
        return token_logprobs[:, first:].sum(1).exp().tolist()

    @torch.inference_mode()
    def _sample(self, texts: Sequence[str], samples: int) -> list[list[int]]:
        prompts = torch.tensor([self._tokenizer.encode(text) for text in texts])
        output = self._model(prompts.repeat_interleave(samples, 0), use_cache=True)
        columns: list[torch.Tensor] = []
        for _ in range(MAX_NEW_TOKENS):
            probabilities = output.logits[:, -1].softmax(-1)
            columns.append(torch.multinomial(probabilities, 1, generator=self._random))
            if (torch.cat(columns, 1) == END).any(1).all():
                break
            cache = output.past_key_values
            output = self._model(columns[-1], past_key_values=cache, use_cache=True)
        return torch.cat(columns, 1).tolist()

    def _score(self, question: Question, row: list[int]) -> float:
        if END not in row:
            return 0.0
        text = self._tokenizer.decode(row[: row.index(END)])
        prompt = Prompt(id=question.id, token_ids=(), answer=question.answer, task=question.task)
        verdict = asyncio.run(self._reward.score(prompt, text, FinishReason.STOP))
        return verdict.correctness or 0.0


def questions_by_digits(num: int, seed: int = 0) -> dict[int, list[Question]]:
    """`num` questions of column_addition_mixed with 4, 5 and 6 digits."""
    kinds: dict[int, list[Question]] = {4: [], 5: [], 6: []}
    for question in islice(column_addition_mixed.questions(seed), 3 * num):
        kinds[int(question.difficulty[0])].append(question)
    return kinds


def questions_by_carries(digits: int, num: int) -> list[list[Question]]:
    """`num` questions of column_addition with 0, 1, ... `digits` carries."""
    rng = random.Random(0)
    kinds: list[list[Question]] = [[] for _ in range(digits + 1)]
    while min(map(len, kinds)) < num:
        lower = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(digits - 1)]
        highest = (rng.randint(1, 9), rng.randint(1, 9))
        question = column_addition_mixed.question([*lower, highest])
        kinds[int(question.difficulty.split("_")[2])].append(question)
    return [questions[:num] for questions in kinds]


def summarize(rates: Sequence[float]) -> tuple[float, float, float, float]:
    """The mean rate, and the shares of easy, medium and hard questions.

    Easy: at least 95 %. Medium: 20 to 70 %. Hard: at most 2 %.
    """
    bands = ((0.95, 1.0), (0.2, 0.7), (0.0, 0.02))
    easy, medium, hard = (
        sum(low <= rate <= high for rate in rates) / len(rates) for low, high in bands
    )
    return sum(rates) / len(rates), easy, medium, hard


def print_column_addition(policy: StartPolicy) -> None:
    """Print the likelihoods of column_addition by digits and carries."""
    print(
        "column_addition, mean likelihood of the worked response of 100 questions: digits, "
        "0 carries, 1 carry, ..."
    )
    for digits in range(3, 7):
        cells = [policy.likelihoods(questions) for questions in questions_by_carries(digits, 100)]
        print(digits, " ".join(f"{sum(cell) / len(cell):.2f}" for cell in cells))


def print_column_addition_mixed(policy: StartPolicy) -> None:
    """Print likelihoods and pass rates of column_addition_mixed by digits."""
    print(
        "column_addition_mixed: digits, measure, mean, at 95 % and above, 20 to 70 %, "
        "at 2 % and below"
    )
    for digits, questions in questions_by_digits(1000).items():
        likelihoods: list[float] = []
        for start in range(0, 1000, 100):
            likelihoods += policy.likelihoods(questions[start : start + 100])
        rates: list[float] = []
        for start in range(0, 200, 10):
            rates += policy.pass_rates(questions[start : start + 10], 128)
        rows = (("likelihood of 1000", likelihoods), ("rate in 128 samples of 200", rates))
        for measure, values in rows:
            shares = [f"{share:.3f}" for share in summarize(values)]
            print(digits, measure, *shares, flush=True)


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(
        prog="python -m tests.lab.start_policy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    policy = StartPolicy(seed=0)
    print_column_addition(policy)
    print_column_addition_mixed(policy)


if __name__ == "__main__":
    main()
