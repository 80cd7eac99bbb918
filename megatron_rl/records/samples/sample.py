"""One kept response: its texts, its verdict, and the values of each token."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.rollout import FinishReason, Role

Floats = npt.NDArray[np.float32]


ALL_KINDS = "all"  # a choice beside the kinds


class SampleKind(enum.StrEnum):
    """Reason for which a sample is kept, apart from chance. All compare the responses of one step.

    SHORTEST, LONGEST: the response with the fewest or the most trainable tokens.
    SUREST_INCORRECT: the incorrect response with the highest mean log-probability under the policy
    that sampled it.
    MOST_CLIPPED: the trained response with the largest share of clipped tokens.
    HIGHEST_MISMATCH: the trained response with the largest mean difference between the
    log-probabilities of engine and trainer.
    """

    SHORTEST = "shortest"
    LONGEST = "longest"
    SUREST_INCORRECT = "surest-incorrect"
    MOST_CLIPPED = "most-clipped"
    HIGHEST_MISMATCH = "highest-mismatch"


@dataclass(frozen=True, kw_only=True)
class SampleSegment:
    """Consecutive tokens of a sample with one author and one weight version.

    text: without a final end-of-sequence token.
    start, stop: its range of the sample's tokens.
    trainable: whether the tokens receive a loss if the sample trains.
    """

    role: Role
    version: int
    trainable: bool
    start: int
    stop: int
    text: str


@dataclass(frozen=True, kw_only=True)
class SampleQuestion:
    """The prompt of a sample: the text that the model read, and the reference answer."""

    prompt_id: str
    task: str
    difficulty: str
    prompt: str
    expected_answer: str


@dataclass(frozen=True, kw_only=True)
class SampleTraining:
    """The part of a sample in the update of its step.

    group_kind: kind of the group, such as "mixed"; "stopped" for a probe that was not extended,
    which may still train; "surplus" for a mixed group that the step did not need.
    is_trained: whether the step's update was planned to train on it.
    advantage: of the response, with penalties and the weight of its group; None without one.
    weight: of its group.
    """

    group_kind: str
    is_trained: bool
    advantage: float | None
    weight: float

    @property
    def has_group_kind(self) -> bool:
        """False for a demonstration, which trains alone: the kind says nothing about it."""
        return not (self.is_trained and self.group_kind == "too_few_verdicts")


@dataclass(frozen=True, kw_only=True)
class SampleTokens:
    """The n tokens after the prompt, tool outputs included, and their values.

    ids: int32 [n].
    texts: text of each token.
    rollout_logprobs: float32 [n], nats, of the policy that sampled the tokens. NaN for tokens that
    were not sampled.

    The rest are values of the trainer, float32 [n]. They are NaN for tokens that did not train:

    logprobs, entropies: nats, of the trainer's policy at the start of the step.
    ratios: the importance ratio of the token in its update.
    advantages: of the token, with corrections.
    clips: int8 [n], see `TokenRatios`. None if the loss does not mark clipped tokens.
    """

    ids: npt.NDArray[np.int32]
    texts: tuple[str, ...]
    rollout_logprobs: Floats
    logprobs: Floats
    entropies: Floats
    ratios: Floats
    advantages: Floats
    clips: npt.NDArray[np.int8] | None

    def __len__(self) -> int:
        """Return n."""
        return len(self.ids)

    @property
    def mismatches(self) -> Floats:
        """Log-probability of the trainer minus the engine's, float32 [n], nats."""
        return self.logprobs - self.rollout_logprobs

    @property
    def mean_logprob(self) -> float | None:
        """The mean log-probability of the sampled tokens under the policy that sampled them."""
        return _mean(self.rollout_logprobs)

    @property
    def mean_mismatch(self) -> float | None:
        """The mean absolute mismatch of the trained tokens, nats."""
        return _mean(np.abs(self.mismatches))

    @property
    def clip_share(self) -> float | None:
        """The share of clipped tokens among the tokens with a ratio."""
        num_ratios = np.count_nonzero(~np.isnan(self.ratios))
        if self.clips is None or not num_ratios:
            return None
        return float(np.count_nonzero(self.clips) / num_ratios)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One kept response.

    group: position of its prompt in the batch of the step.
    kinds: reasons for which it was kept. Empty for the others of a kept group.
    """

    step: int
    group: int
    sample_index: int
    rollout_id: str
    kinds: tuple[SampleKind, ...]
    question: SampleQuestion
    verdict: Verdict
    repetition: float
    finish_reason: FinishReason
    training: SampleTraining
    segments: tuple[SampleSegment, ...]
    tokens: SampleTokens

    @property
    def text(self) -> str:
        """The texts of all segments."""
        return "".join(segment.text for segment in self.segments)


def _mean(values: Floats) -> float | None:
    """Return the mean of the values that are not NaN, None without any."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None
