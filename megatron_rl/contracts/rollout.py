"""One sampled trajectory: tokens, log-probabilities and expert routes.

Weight versions are integers: the number of weight syncs since the run's start checkpoint, which is
version 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_bridge.generation import FinishReason

__all__ = ["FinishReason", "Role", "Rollout", "Segment"]


class Role(enum.StrEnum):
    """Who wrote a segment of a trajectory."""

    PROMPT = "prompt"
    RESPONSE = "response"
    TOOL = "tool"


@dataclass(frozen=True)
class Segment:
    """A run of tokens with one author and one weight version.

    tokens: int32 [n]. logprobs: float32 [n], nats, under the policy that sampled them; None where
    nothing was sampled. trainable: whether these tokens receive a loss. route_rows: half-open range
    of rows of `Rollout.routes` recorded while these tokens were inputs. version: the weights that
    produced the segment.
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

    routes: uint8 or uint16 [n - 1, moe_layers, topk], expert ids; row t holds the experts used
    while token t was the input, so rows match `tokens[:-1]` and the last sampled token has none.
    None when the engine recorded no routes.
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
