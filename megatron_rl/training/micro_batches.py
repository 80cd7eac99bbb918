"""Packs rollouts into the micro-batches that the old-policy pass and the update share."""

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
_ON_OTHER_RANK = -1


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of B sequences with T trained tokens in all.

    This rank holds R of the T trained tokens: all of them, unless context parallelism splits the
    sequences. A filler has T = 0 and B = 0.

    inputs: the model's inputs on this rank.
    rows: int64 [R], rows of these inputs whose next token is trained.
    targets: int64 [R], those next tokens.
    places: int64 [R], their places among the T trained tokens, ascending.
    rollout_logprobs: float32 [T], NaN for tokens that were not sampled.
    advantages: float32 [T], of the token's sequence.
    cu_seqlens: int32 [B + 1], bounds of each sequence's trained tokens. A sequence without trained
    tokens is empty.
    entropy_advantages, weights: float32 [T], of the token's sequence; see `StepPlan`.
    versions: int64 [T] on the host, of the weights that sampled the token. -1 for tokens that were
    not sampled.
    """

    inputs: PackedBatch
    rows: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor
    entropy_advantages: torch.Tensor
    weights: torch.Tensor
    versions: np.ndarray


class Batcher:
    """Packs rollouts for one rank.

    routes: None if the rollouts' routes are not replayed.
    device: of the tensors.
    multiple: the number of rows of a pack on every rank is a multiple of it. The last sequence is
    padded for this.
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
        """Return the seconds spent on packing and sending routes since the last call."""
        seconds = self._route_seconds
        self._route_seconds = 0.0
        return seconds

    def optimizer_steps(
        self, plan: StepPlan, dp_rank: int, rollouts: Mapping[int, Rollout]
    ) -> list[list[MicroBatch]]:
        """Pack this rank's micro-batches of every optimizer step of a plan.

        rollouts: by index in the plan.
        """
        entropy_advantages = plan.entropy_advantages or (0.0,) * len(plan.advantages)
        weights = plan.weights or (1.0,) * len(plan.advantages)

        def pack(indices: Sequence[int]) -> MicroBatch:
            return self.pack(
                [rollouts[i] for i in indices],
                [plan.advantages[i] for i in indices],
                [entropy_advantages[i] for i in indices],
                [weights[i] for i in indices],
            )

        return [
            [pack(indices) for indices in step.micro_batches[dp_rank]]
            for step in plan.optimizer_steps
        ]

    def pack(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        entropy_advantages: Sequence[float] = (),
        weights: Sequence[float] = (),
    ) -> MicroBatch:
        """Pack rollouts, whose routes hold this rank's MoE layers only.

        rollouts: none for a filler without loss.
        entropy_advantages: empty for 0 everywhere. weights: empty for 1 everywhere.
        """
        sequences = [
            _Sequence.from_rollout(rollout, advantage)
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]
        padded_lengths = self._padded_lengths(sequences)
        starts = _offsets(padded_lengths)
        local_rows = self._view.context_rows(starts)
        rows = _rows_of_trained_tokens(sequences, starts, local_rows)
        is_local = rows != _ON_OTHER_RANK
        num_trained = [len(sequence.trained_rows) for sequence in sequences]
        targets = _concatenate([s.targets for s in sequences], np.int64)
        return MicroBatch(
            inputs=self._pack_inputs(sequences, rollouts, padded_lengths, starts, local_rows),
            rows=self._tensor(rows[is_local]),
            targets=self._tensor(targets[is_local]),
            places=self._tensor(np.flatnonzero(is_local)),
            rollout_logprobs=self._floats([s.logprobs for s in sequences]),
            advantages=self._floats([s.advantages for s in sequences]),
            cu_seqlens=self._tensor(_offsets(num_trained)),
            entropy_advantages=self._per_token(entropy_advantages, num_trained, default=0.0),
            weights=self._per_token(weights, num_trained, default=1.0),
            versions=_concatenate([s.versions for s in sequences], np.int64),
        )

    def _per_token(
        self, values: Sequence[float], num_trained: Sequence[int], *, default: float
    ) -> torch.Tensor:
        """Repeat each sequence's value for its trained tokens, float32 [T]. Empty: the default."""
        array = np.array(values or [default] * len(num_trained), np.float32)
        return self._tensor(array.repeat(num_trained))

    def _padded_lengths(self, sequences: Sequence[_Sequence]) -> list[int]:
        """Return the number of rows of each sequence with padding; one sequence for a filler."""
        lengths = [len(sequence.inputs) for sequence in sequences] or [_FILLER_TOKENS]
        padded_lengths = [_round_up(length, self._view.row_multiple) for length in lengths]
        padded_lengths[-1] += -sum(padded_lengths) % self._multiple
        return padded_lengths

    def _pack_inputs(
        self,
        sequences: Sequence[_Sequence],
        rollouts: Sequence[Rollout],
        padded_lengths: Sequence[int],
        starts: np.ndarray,
        local_rows: np.ndarray,
    ) -> PackedBatch:
        """Pack the model's inputs on this rank. local_rows: rows of the pack on this rank."""
        input_ids = np.zeros(starts[-1], np.int64)
        for start, sequence in zip(starts, sequences, strict=False):
            input_ids[start : start + len(sequence.inputs)] = sequence.inputs
        positions = np.concatenate([np.arange(length) for length in padded_lengths])
        return PackedBatch(
            input_ids=self._tensor(input_ids[local_rows])[None],
            position_ids=self._tensor(positions[local_rows])[None],
            cu_seqlens=self._tensor(starts),
            max_seqlen=max(padded_lengths),
            routes=self._pack_routes(rollouts, starts),
            real_rows=self._real_rows(sequences, starts),
        )

    def _pack_routes(self, rollouts: Sequence[Rollout], starts: np.ndarray) -> torch.Tensor | None:
        """Pack the routes of the rows that this rank's routers see.

        Padding rows are distributed over the experts in turn.
        """
        if self._routes is None:
            return None
        start_time = time.perf_counter()
        routes = round_robin_routes(
            int(starts[-1]),
            self._num_moe_layers,
            num_experts=self._routes.num_experts,
            topk=self._routes.topk,
        )
        for start, rollout in zip(starts, rollouts, strict=False):
            if rollout.routes is None:
                raise ValueError(
                    f"rollout {rollout.rollout_id} has no routes to replay. "
                    "Set train.replay=trainer or off"
                )
            routes[start : start + len(rollout.routes)] = rollout.routes
        tensor = self._tensor(routes[self._view.input_rows(starts)])
        self._route_seconds += time.perf_counter() - start_time
        return tensor

    def _real_rows(self, sequences: Sequence[_Sequence], starts: np.ndarray) -> torch.Tensor:
        """Return bool [rows that this rank's routers see], False for padding."""
        is_real = np.zeros(starts[-1], bool)
        for start, sequence in zip(starts, sequences, strict=False):
            is_real[start : start + len(sequence.inputs)] = True
        return self._tensor(is_real[self._view.input_rows(starts)])

    def _floats(self, parts: Sequence[np.ndarray]) -> torch.Tensor:
        """Concatenate arrays to float32 on the device."""
        return self._tensor(_concatenate(parts, np.float32))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """Send an array to the device without waiting for the copy."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()  # a copy from other memory would wait
        return tensor.to(self._device, non_blocking=True)


@dataclass(frozen=True)
class _Sequence:
    """One rollout of n tokens as a training sequence of n - 1 inputs.

    trained_rows: rows of `inputs` whose next token is trained.
    targets, logprobs, advantages, versions: of these next tokens.
    """

    inputs: np.ndarray
    trained_rows: np.ndarray
    targets: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray

    @classmethod
    def from_rollout(cls, rollout: Rollout, advantage: float) -> _Sequence:
        segments = rollout.segments
        tokens = np.concatenate([s.tokens for s in segments]).astype(np.int64)
        is_trainable = np.concatenate([np.full(len(s.tokens), s.trainable) for s in segments])
        logprobs = np.concatenate(
            [np.full(len(s.tokens), np.nan) if s.logprobs is None else s.logprobs for s in segments]
        )
        versions = np.concatenate(
            [np.full(len(s.tokens), -1 if s.logprobs is None else s.version) for s in segments]
        )
        trained_rows = np.flatnonzero(is_trainable[1:])
        return cls(
            inputs=tokens[:-1],
            trained_rows=trained_rows,
            targets=tokens[1:][trained_rows],
            logprobs=logprobs[1:][trained_rows],
            advantages=np.full(len(trained_rows), advantage, np.float32),
            versions=versions[1:][trained_rows],
        )


def _rows_of_trained_tokens(
    sequences: Sequence[_Sequence], starts: np.ndarray, local_rows: np.ndarray
) -> np.ndarray:
    """Return this rank's row of every trained token, or `_ON_OTHER_RANK`."""
    row_on_rank = np.full(starts[-1], _ON_OTHER_RANK)
    row_on_rank[local_rows] = np.arange(len(local_rows))
    rows_of_pack = [
        start + sequence.trained_rows for start, sequence in zip(starts, sequences, strict=False)
    ]
    return row_on_rank[_concatenate(rows_of_pack, np.int64)]


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    """Return the bounds of consecutive ranges, int32 [n + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _round_up(length: int, multiple: int) -> int:
    return length + -length % multiple


def _concatenate(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
