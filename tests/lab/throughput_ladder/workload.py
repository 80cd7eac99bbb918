"""The responses of a step: their prompts, their forced lengths, and what is expected of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_bridge.request import GenerateRequest, encode_request
from tests.lab.run_time.simulation.lengths import LogNormalLengths

PROMPT_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response that will have `length` tokens.

    token_ids: its prompt. history: what a prompt's responses of the epoch before let expect.
    """

    prompt: int
    sample: int
    token_ids: Sequence[int]
    length: int
    history: int

    @property
    def name(self) -> str:
        return f"{self.prompt}/{self.sample}"

    @property
    def seed(self) -> int:
        """The seed of its tokens, the same in every rung."""
        return 1000 * self.prompt + self.sample + 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lognormal lengths, which end at a cap.

    spread: standard deviation of the logarithm; 0 makes all lengths the median.
    between_prompts: share of its variance that the responses to one prompt have in common.
    """

    prompts: int = 16
    samples: int = 8
    median: float = 40.0
    spread: float = 1.2
    between_prompts: float = 0.7
    cap: int = 600
    vocab_size: int = 16

    def responses(self, seed: int) -> list[Response]:
        """Return the responses of a step in the order of its prompts."""
        random = np.random.default_rng(seed)
        prompts = random.integers(3, self.vocab_size, (self.prompts, PROMPT_TOKENS)).tolist()
        workload = LogNormalLengths(
            prompts=self.prompts,
            samples=self.samples,
            median=self.median,
            spread=self.spread,
            between_prompts=self.between_prompts,
            cap=self.cap,
            prompt_tokens=PROMPT_TOKENS,
            seed=seed,
            knowledge="history",
        )
        lengths = workload.lengths(1)
        history = workload.expectations(1)
        return [
            Response(
                prompt=prompt,
                sample=sample,
                token_ids=prompts[prompt],
                length=lengths[prompt][sample],
                history=history[prompt][sample],
            )
            for prompt in range(self.prompts)
            for sample in range(self.samples)
        ]


def encode_to_the_end(*requests: GenerateRequest) -> bytes:
    """Encode requests that end at `max_new_tokens` alone."""
    body = encode_request(*requests)
    longest = body.replace(b'"ignore_eos":false', b'"ignore_eos":true')
    assert longest != body
    return longest
