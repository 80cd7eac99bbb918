"""The lengths of the responses that a simulated run samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

# Tokens of the responses to each prompt of a step
GroupLengths = Sequence[Sequence[int]]
Knowledge = Literal["nothing", "history", "truth"]
_Tokens = npt.NDArray[np.float64]


class Workload(Protocol):
    """The lengths of all responses of a run, whatever samples them, and in whatever order.

    prompt_tokens: of each prompt.
    """

    @property
    def prompt_tokens(self) -> int: ...

    def lengths(self, step: int) -> GroupLengths:
        """Return the lengths of a step's responses by prompt. step: from 1 on."""
        ...

    def expectations(self, step: int) -> GroupLengths:
        """Return what a run expects of these lengths, 0 where it knows nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """Lengths with a lognormal distribution that ends at a cap.

    median: in tokens. spread: standard deviation of the logarithm. between_prompts: share of its
    variance that the responses to one prompt have in common. cap: the largest length. knowledge:
    what a run knows of the lengths: the geometric mean of as many other responses to the prompt, as
    after an epoch, or the truth.

    Raises ValueError for values outside of their limits.
    """

    prompts: int
    samples: int
    median: float
    spread: float
    between_prompts: float
    cap: int
    prompt_tokens: int
    seed: int
    knowledge: Knowledge = "nothing"

    def __post_init__(self) -> None:
        counts = (self.prompts, self.samples, self.cap, self.prompt_tokens)
        if min(counts) < 1 or self.median <= 0:
            raise ValueError("prompts, samples, cap, prompt_tokens and median must be above 0")
        if self.spread < 0 or not 0 <= self.between_prompts <= 1:
            raise ValueError("spread must be at least 0, and between_prompts from 0 to 1")

    def lengths(self, step: int) -> GroupLengths:
        return self._draw(step)[0].astype(int).tolist()

    def expectations(self, step: int) -> GroupLengths:
        lengths, others = self._draw(step)
        match self.knowledge:
            case "nothing":
                tokens = np.zeros_like(lengths)
            case "history":
                means = np.exp(np.log(others).mean(1, keepdims=True))
                tokens = np.broadcast_to(np.rint(means), lengths.shape)
            case "truth":
                tokens = lengths
        return tokens.astype(int).tolist()

    def _draw(self, step: int) -> tuple[_Tokens, _Tokens]:
        """Return the lengths of a step by prompt, and those of other responses to the prompts."""
        random = np.random.default_rng([self.seed, step])
        common = random.standard_normal((self.prompts, 1))
        lengths = self._of(common, random)
        return lengths, self._of(common, random)

    def _of(self, common: _Tokens, random: np.random.Generator) -> _Tokens:
        single = random.standard_normal((self.prompts, self.samples))
        mixture = math.sqrt(self.between_prompts) * common
        mixture = mixture + math.sqrt(1 - self.between_prompts) * single
        tokens = np.rint(self.median * np.exp(self.spread * mixture))
        return np.clip(tokens, 1, self.cap)


@dataclass(frozen=True)
class TraceLengths:
    """Lengths that a run had. They begin again after the last step.

    steps: by step and prompt. Raises ValueError without a step, or with an empty response.
    """

    steps: Sequence[GroupLengths]
    prompt_tokens: int

    def __post_init__(self) -> None:
        tokens = [length for step in self.steps for group in step for length in group]
        if not tokens or min(tokens) < 1:
            raise ValueError("a trace needs a step with responses, each of at least one token")

    def lengths(self, step: int) -> GroupLengths:
        return self.steps[(step - 1) % len(self.steps)]

    def expectations(self, step: int) -> GroupLengths:
        return [[0] * len(group) for group in self.lengths(step)]
