"""Values of the trained tokens of one step on one rank, for the samples that the run keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.losses import LossResult, TokenRatios
from megatron_rl.losses.clipped_ratio import limited_ratio
from megatron_rl.losses.sequences import sequence_lengths, sequence_means
from megatron_rl.mcore.collectives import gather_bytes
from megatron_rl.records.samples.parts import ValuePart
from megatron_rl.records.samples.sample import SampleKind
from megatron_rl.training.old_policy import BatchObjective

# The largest value of a kind on one rank, and the index of its rollout in the plan
Extremes = dict[str, tuple[float, int]]
_NO_EXTREME = (0.0, -1)


class TokenValues:
    """Holds the values of trained tokens where they were computed, until some are asked for.

    plan: of the step. dp_rank: of this rank.
    objectives: of all micro-batches of the step in order. Empty unless this rank is of the last
    pipeline stage.
    problem: the first error that lost values. No such error ends a step: samples are for people.
    """

    def __init__(self, plan: StepPlan, dp_rank: int, objectives: Sequence[BatchObjective]) -> None:
        self._objectives = objectives
        batches = itertools.chain.from_iterable(
            step.micro_batches[dp_rank] for step in plan.optimizer_steps
        )
        self._indices = list(batches) if objectives else []
        self._ratios: dict[int, TokenRatios] = {}
        self.problem = ""

    def observed_objectives(self) -> list[BatchObjective]:
        """Return the objectives, whose ratios are held from now on."""
        return [
            replace(objective, observe=partial(self._observe, batch))
            for batch, objective in enumerate(self._objectives)
        ]

    def extremes(self) -> Extremes:
        """Return the largest mean mismatch and the largest share of clipped tokens, above 0."""
        try:
            return self._extremes()
        except Exception as error:
            self.problem = self.problem or describe(error)
            return {}

    def part(self, plan_index: int) -> ValuePart | None:
        """Return the values of one rollout, None if it did not train on this rank."""
        for batch, indices in enumerate(self._indices):
            if plan_index in indices:
                return self._part(batch, indices.index(plan_index))
        return None

    def _extremes(self) -> Extremes:
        largest: Extremes = {}
        for batch, indices in enumerate(self._indices):
            for kind, means in self._sequence_means(batch).items():
                for extreme in zip(means.tolist(), indices, strict=True):
                    largest[kind] = _larger(largest.get(kind, _NO_EXTREME), extreme)
        return {kind: extreme for kind, extreme in largest.items() if extreme[0] > 0}

    def _observe(self, batch: int, logprobs: torch.Tensor, result: LossResult) -> None:
        try:
            self._ratios[batch] = self._token_ratios(batch, logprobs, result)
        except Exception as error:
            self.problem = self.problem or describe(error)

    def _token_ratios(self, batch: int, logprobs: torch.Tensor, result: LossResult) -> TokenRatios:
        if result.token_ratios is not None:
            return result.token_ratios()
        ratios = limited_ratio(logprobs - self._objectives[batch].old_logprobs)
        return TokenRatios(ratios, None)

    def _sequence_means(self, batch: int) -> dict[SampleKind, torch.Tensor]:
        """Return the means of the micro-batch's sequences, float32 [B], by kind."""
        response = self._objectives[batch].response
        lengths = sequence_lengths(response.cu_seqlens)
        mismatch = (response.old_logprobs - response.rollout_logprobs).abs()
        means = {SampleKind.HIGHEST_MISMATCH: sequence_means(mismatch, lengths)}
        ratios = self._ratios.get(batch)
        if ratios is not None and ratios.clips is not None:
            is_clipped = ratios.clips.abs().float()
            means[SampleKind.MOST_CLIPPED] = sequence_means(is_clipped, lengths)
        return means

    def _part(self, batch: int, position: int) -> ValuePart:
        response = self._objectives[batch].response
        start, stop = response.cu_seqlens[position : position + 2].tolist()
        ratios = self._ratios.get(batch)
        clips = None if ratios is None else ratios.clips
        return ValuePart(
            old_logprobs=_to_bytes(response.old_logprobs[start:stop]),
            entropies=_to_bytes(response.old_entropies[start:stop]),
            advantages=_to_bytes(response.advantages[start:stop]),
            ratios=None if ratios is None else _to_bytes(ratios.ratios[start:stop]),
            clips=None if clips is None else clips[start:stop].cpu().numpy().tobytes(),
        )


def merge_extremes(extremes: Extremes, group: dist.ProcessGroup | None) -> dict[SampleKind, int]:
    """Return the index in the plan of the rollout with the largest value of all ranks, by kind.

    A collective.
    """
    largest: Extremes = {}
    for data in gather_bytes(msgspec.msgpack.encode(extremes), group):
        for kind, extreme in msgspec.msgpack.decode(data, type=Extremes).items():
            largest[kind] = _larger(largest.get(kind, _NO_EXTREME), extreme)
    return {SampleKind(kind): index for kind, (_, index) in largest.items()}


def describe(error: Exception) -> str:
    """Return one line that names an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _larger(left: tuple[float, int], right: tuple[float, int]) -> tuple[float, int]:
    """Return the pair with the larger value. If they are equal, the smaller index wins.

    NaN on the right is never larger.
    """
    if right[0] == left[0]:
        return min(left, right)
    return right if right[0] > left[0] else left


def _to_bytes(values: torch.Tensor) -> bytes:
    return values.detach().float().cpu().numpy().tobytes()
