"""The typed contracts that the stages of one training step hand to each other.

Invariant: values are validated where they enter the trainer (prompt files, engine replies, messages between processes)
and trusted afterwards; nothing here imports torch. What crosses a process boundary is a `msgspec.Struct`; token data
stays in numpy arrays and crosses through shared memory (`rollout.codec`, `rollout.payload_store`).

Weight versions are integers: the number of weight syncs since the run's start checkpoint, which is version 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

Count = Annotated[int, msgspec.Meta(ge=0)]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `id` is unique within a run's data; `difficulty` is a free label that metrics group by."""

    id: str
    token_ids: tuple[int, ...]
    answer: str
    task: str
    difficulty: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How responses are drawn. Training needs the untruncated distribution (top_p 1, top_k off, no penalties)."""

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()


class Role(enum.StrEnum):
    """Who wrote a segment of a trajectory."""

    PROMPT = "prompt"
    RESPONSE = "response"
    TOOL = "tool"


class FinishReason(enum.StrEnum):
    """Why generation ended: an end-of-sequence token, the token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Segment:
    """A run of tokens with one author and one weight version.

    tokens: int32 [n]. logprobs: float32 [n], nats, under the policy that sampled them; None where nothing was sampled.
    trainable: whether these tokens receive a loss. route_rows: half-open range of rows of `Rollout.routes` recorded
    while these tokens were inputs. version: the weights that produced the segment.
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

    routes: uint8 or uint16 [n - 1, moe_layers, topk], expert ids; row t holds the experts used while token t was the
    input, so rows match `tokens[:-1]` and the last sampled token has none. None when the engine recorded no routes.
    """

    trajectory_id: str
    prompt_id: str
    sample_index: int
    finish_reason: FinishReason
    segments: tuple[Segment, ...]
    routes: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the reward says of one rollout.

    reward: None when there is no verdict (the scorer failed or timed out): such a sample leaves its group's statistics
    and is counted; it is not a zero. correctness: the raw score that zero variance is judged on, apart from shaping
    terms. answer: the final answer found in the response, None when there is none to be found. seconds: scoring time.
    reason: why there is no verdict.
    """

    reward: float | None
    correctness: float | None
    answer: str | None = None
    shaping: dict[str, float] = {}
    seconds: float = 0.0
    reason: str = ""


class PayloadLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a collector keeps an encoded rollout: bytes [offset, offset + nbytes) of one shared-memory segment."""

    node: Count
    pid: Count
    fd: Count
    offset: Count
    nbytes: Count


class SampleRef(msgspec.Struct, frozen=True, kw_only=True):
    """All that rank 0 needs to know of a rollout to plan a step; the payload stays with its collector.

    num_inputs: tokens the model reads when it trains on this sample (trajectory length - 1).
    num_trainable: tokens that receive a loss. versions: weight versions of its sampled segments, ascending.
    """

    trajectory_id: str
    prompt_id: str
    sample_index: Count
    num_inputs: Count
    num_trainable: Count
    finish_reason: FinishReason
    versions: tuple[int, ...]
    verdict: Verdict
    location: PayloadLocation
    generate_seconds: float = 0.0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's rollouts and verdicts.

    rejected: samples dropped before a verdict, by reason. generated_at, judged_at: when the last response arrived and
    when the last verdict was there, in seconds of the collector's monotonic clock.
    """

    group_id: str
    prompt: Prompt
    samples: tuple[SampleRef, ...]
    rejected: dict[str, int] = {}
    generated_at: float = 0.0
    judged_at: float = 0.0


class Denominators(msgspec.Struct, frozen=True, kw_only=True):
    """Global constants of one optimizer step's loss, fixed before its first micro-batch.

    sequences: samples with a verdict and a non-zero advantage on a trainable token. tokens: their trainable tokens.
    """

    sequences: Count
    tokens: Count


class OptimizerStep(msgspec.Struct, frozen=True, kw_only=True):
    """micro_batches[dp_rank][m] lists indices into `StepPlan.samples`; an empty tuple is a zero-loss filler.

    Every data-parallel rank has the same number of micro-batches.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    denominators: Denominators


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains what in one training step. advantages[i] belongs to samples[i]."""

    step: Count
    samples: tuple[SampleRef, ...]
    advantages: tuple[float, ...]
    optimizer_steps: tuple[OptimizerStep, ...]


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Rollouts are under way: ask again. Keeps collectives from timing out while rank 0 is busy."""


class Sync(msgspec.Struct, frozen=True, tag="sync"):
    """Export the weights as `version` to the engines of these indices (every engine when empty)."""

    version: int
    engines: tuple[int, ...] = ()
    audit: bool = False


class Train(msgspec.Struct, frozen=True, tag="plan"):
    """Run one training step."""

    plan: StepPlan


class SaveWeights(msgspec.Struct, frozen=True, tag="save"):
    """Write the current weights in Hugging Face format into a directory."""

    path: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop at once; rank 0 has said why."""

    reason: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The run is complete."""


Command = Wait | Sync | Train | SaveWeights | Abort | Finish
