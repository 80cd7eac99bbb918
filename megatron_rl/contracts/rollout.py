"""One sampled trajectory: tokens, log-probabilities and expert routes.

A weight version is the number of weight syncs since the run's start checkpoint, which is version 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_bridge.generation import FinishReason

__all__ = ["FinishReason", "Role", "Rollout", "Segment"]


class Role(enum.StrEnum):
    """Author of a segment of a trajectory."""

    PROMPT = "prompt"
    RESPONSE = "response"
    TOOL = "tool"


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens with one author and one weight version.

    tokens: int32 [n].
    trainable: whether the tokens receive a loss.
    logprobs: float32 [n], nats, under the policy that sampled the tokens. None if they were not
    sampled.
    route_rows: half-open range of the rows of `Rollout.routes` that were recorded while these
    tokens were inputs.
    version: version of the weights that read or sampled the tokens.
    """

    tokens: npt.NDArray[np.int32]
    role: Role
    trainable: bool
    logprobs: npt.NDArray[np.float32] | None
    route_rows: tuple[int, int]
    version: int


@dataclass(frozen=True)
class Rollout:
    """One sampled trajectory of `n` tokens.

    routes: uint8 or uint16 [n - 1, moe_layers, topk], expert ids. Row t holds the experts used
    while token t was the input. Rows match `tokens[:-1]`, because the last sampled token is never
    an input. None if the engine recorded no routes.
    """

    rollout_id: str
    prompt_id: str
    sample_index: int
    finish_reason: FinishReason
    segments: tuple[Segment, ...]
    routes: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)
