"""Rollouts become the packed micro-batches that the old-policy pass and the update share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteShape, round_robin_routes
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore.packed_batch import PackedBatch
from megatron_rl.planning.rank_view import RankView

_FILLER_TOKENS = 2
_ELSEWHERE = -1


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of B sequences with T trained tokens in all.

    packed: the model's inputs on this rank, which holds R of the T trained tokens: all of them
    unless sequences are shared by context parallelism. rows int64 [R]: rows of these inputs whose
    next token is trained. targets int64 [R]: those next tokens. places int64 [R]: which of the T
    they are, ascending. rollout_logprobs float32 [T], NaN where nobody sampled the token.
    advantages float32 [T]; entropy_advantages float32 [T]: see `StepPlan`, which each token of a
    sequence has from it. cu_seqlens int32 [B + 1]: trained tokens of each sequence, a sequence
    without any counts as empty. A filler has T = 0 and B = 0.
    """

    packed: PackedBatch
    rows: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor
    entropy_advantages: torch.Tensor


class Batcher:
    """Packs rollouts for one rank. routes None: theirs are not replayed. device: where the tensors
    go.

    multiple: every rank's rows of a pack are a multiple of it; the pack's last sequence is padded
    up to that.
    """

    def __init__(
        self, view: RankView, routes: RouteShape | None, device: torch.device, *, multiple: int = 1
    ) -> None:
        self._view = view
        self._multiple = multiple * view.row_multiple if multiple > 1 else 1
        self._routes = routes
        self._num_moe_layers = len(view.moe_rows(routes.moe_layers)) if routes is not None else 0
        self._device = device
        self._route_seconds = 0.0

    def take_route_seconds(self) -> float:
        """What packing routes and sending them to the device took since the last call."""
        seconds, self._route_seconds = self._route_seconds, 0.0
        return seconds

    def optimizer_steps(
        self, plan: StepPlan, dp_rank: int, rollouts: Mapping[int, Rollout]
    ) -> list[list[MicroBatch]]:
        """This rank's micro-batches of every optimizer step of a plan.

        rollouts: by index in the plan.
        """
        entropic = plan.entropy_advantages or (0.0,) * len(plan.advantages)
        return [
            [
                self.pack(
                    [rollouts[i] for i in batch],
                    [plan.advantages[i] for i in batch],
                    [entropic[i] for i in batch],
                )
                for batch in step.micro_batches[dp_rank]
            ]
            for step in plan.optimizer_steps
        ]

    def pack(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        entropy_advantages: Sequence[float] = (),
    ) -> MicroBatch:
        """Pack rollouts (none: a zero-loss filler). Their routes hold this rank's MoE layers only.

        entropy_advantages: none for 0 everywhere.
        """
        sequences = [
            _Sequence.of(rollout, advantage)
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]
        lengths = [len(s.inputs) for s in sequences]
        padded = [n + -n % self._view.row_multiple for n in lengths]
        if not sequences:
            padded = [_FILLER_TOKENS + -_FILLER_TOKENS % self._view.row_multiple]
        padded[-1] += -sum(padded) % self._multiple
        starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
        inputs = np.zeros(starts[-1], np.int64)
        for start, sequence in zip(starts, sequences, strict=False):
            inputs[start : start + len(sequence.inputs)] = sequence.inputs
        held = self._view.context_rows(starts)
        row_of = np.full(starts[-1], _ELSEWHERE)
        row_of[held] = np.arange(len(held))
        rows = row_of[
            _joined(
                [start + s.trained for start, s in zip(starts, sequences, strict=False)], np.int64
            )
        ]
        here = rows != _ELSEWHERE
        trained = [len(s.trained) for s in sequences]
        counts = np.concatenate([[0], np.cumsum(trained)]).astype(np.int32)
        entropic = np.array(entropy_advantages or [0.0] * len(sequences), np.float32).repeat(
            trained
        )
        return MicroBatch(
            packed=PackedBatch(
                input_ids=self._tensor(inputs[held])[None],
                position_ids=self._tensor(np.concatenate([np.arange(n) for n in padded])[held])[
                    None
                ],
                cu_seqlens=self._tensor(starts),
                max_seqlen=max(padded),
                routes=self._pack_routes(rollouts, starts),
                real_rows=self._real_rows(lengths, starts),
            ),
            rows=self._tensor(rows[here]),
            targets=self._tensor(_joined([s.targets for s in sequences], np.int64)[here]),
            places=self._tensor(np.flatnonzero(here)),
            rollout_logprobs=self._tensor(_joined([s.logprobs for s in sequences], np.float32)),
            advantages=self._tensor(_joined([s.advantages for s in sequences], np.float32)),
            cu_seqlens=self._tensor(counts),
            entropy_advantages=self._tensor(entropic),
        )

    def _pack_routes(self, rollouts: Sequence[Rollout], starts: np.ndarray) -> torch.Tensor | None:
        """The route rows of this rank: padding rows are round-robin, then context and sequence
        parallelism select.
        """
        if self._routes is None:
            return None
        began = time.perf_counter()
        packed = round_robin_routes(
            int(starts[-1]),
            self._num_moe_layers,
            num_experts=self._routes.num_experts,
            topk=self._routes.topk,
        )
        for start, rollout in zip(starts, rollouts, strict=False):
            if rollout.routes is None:
                raise ValueError(
                    f"rollout {rollout.rollout_id} has no routes to replay: set train.replay=trainer or off"
                )
            packed[start : start + len(rollout.routes)] = rollout.routes
        moved = self._tensor(packed[self._view.input_rows(starts)])
        self._route_seconds += time.perf_counter() - began
        return moved

    def _real_rows(self, lengths: Sequence[int], starts: np.ndarray) -> torch.Tensor:
        real = np.zeros(starts[-1], bool)
        for start, length in zip(starts, lengths, strict=False):
            real[start : start + length] = True
        return self._tensor(real[self._view.input_rows(starts)])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """On the device, without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()  # else the copy waits
        return tensor.to(self._device, non_blocking=True)


@dataclass(frozen=True)
class _Sequence:
    """One rollout as inputs tokens[:-1]; `trained` are the input rows whose next token is trained."""

    inputs: np.ndarray
    trained: np.ndarray
    targets: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray

    @classmethod
    def of(cls, rollout: Rollout, advantage: float) -> _Sequence:
        tokens = np.concatenate([s.tokens for s in rollout.segments]).astype(np.int64)
        trainable = np.concatenate([np.full(len(s.tokens), s.trainable) for s in rollout.segments])
        logprobs = np.concatenate(
            [
                np.full(len(s.tokens), np.nan) if s.logprobs is None else s.logprobs
                for s in rollout.segments
            ]
        )
        trained = np.flatnonzero(trainable[1:])
        return cls(
            inputs=tokens[:-1],
            trained=trained,
            targets=tokens[1:][trained],
            logprobs=logprobs[1:][trained],
            advantages=np.full(len(trained), advantage, np.float32),
        )


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
