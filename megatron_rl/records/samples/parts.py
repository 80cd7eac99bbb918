"""Parts of a sample, as ranks send them to rank 0."""

from __future__ import annotations

import msgspec

from megatron_rl.contracts.rollout import Role
from megatron_rl.contracts.wire_types import Count


class SegmentPart(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens with one author and one weight version.

    length: number of tokens.
    """

    role: Role
    version: int
    trainable: bool
    length: Count


class TokenPart(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a rollout, from the node that stores it.

    tokens: int32 [n].
    logprobs: float32 [n], nats, of the policy that sampled the tokens. NaN for tokens that were not
    sampled.
    """

    segments: tuple[SegmentPart, ...]
    tokens: bytes
    logprobs: bytes


class ValuePart(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the T trained tokens of a rollout, from a rank that trained on it.

    old_logprobs, entropies, advantages: float32 [T], of the trainer's policy at the start of the
    step.
    ratios: float32 [T], None if the step ended before the update of this rollout.
    clips: int8 [T], see `TokenRatios`. None as well for a loss that does not mark them.
    """

    old_logprobs: bytes
    entropies: bytes
    advantages: bytes
    ratios: bytes | None = None
    clips: bytes | None = None


class SamplePart(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a sample.

    index: position in the `sources` of `GatherSamples`.
    problem: why the tokens cannot be read.
    """

    index: Count
    tokens: TokenPart | None = None
    values: ValuePart | None = None
    problem: str = ""
