"""Sends tokens and values of samples from the ranks that hold them to rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch.distributed as dist

from megatron_rl.contracts.commands import GatherSamples
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.mcore.collectives import send_to_rank_zero
from megatron_rl.records.samples.parts import SamplePart, SegmentPart, TokenPart
from megatron_rl.rollouts.wire.store import read_rollout
from megatron_rl.training.exchange.transfer_plan import Receiver
from megatron_rl.training.samples.token_values import TokenValues, describe


def gather_samples(
    command: GatherSamples,
    values: TokenValues | None,
    receivers: Sequence[Receiver],
    rank: int,
    group: dist.ProcessGroup | None,
) -> list[SamplePart]:
    """Return the parts of the samples on rank 0, and an empty list on the others (a collective).

    The first rank of each node reads the tokens of the rollouts that the node stores.

    values: what this rank sends, None if it sends nothing.
    """
    node = receivers[rank].node
    is_reader = rank == min(r for r, receiver in enumerate(receivers) if receiver.node == node)
    parts = list(_value_parts(command, values))
    if is_reader:
        parts += _token_parts(command, node)
    data = msgspec.msgpack.encode(parts) if parts else b""
    return [
        part
        for message in send_to_rank_zero(data, group)
        if message
        for part in msgspec.msgpack.decode(message, type=list[SamplePart])
    ]


def _value_parts(command: GatherSamples, values: TokenValues | None) -> Iterator[SamplePart]:
    if values is None:
        return
    if values.problem:
        yield SamplePart(index=0, problem=values.problem)
    for index, source in enumerate(command.sources):
        if source.plan_index is not None:
            yield from _value_part(index, source.plan_index, values)


def _value_part(index: int, plan_index: int, values: TokenValues) -> Iterator[SamplePart]:
    try:
        part = values.part(plan_index)
    # Any exception: a rank that raises alone would leave the others waiting
    except Exception as error:
        yield SamplePart(index=index, problem=describe(error))
        return
    if part is not None:
        yield SamplePart(index=index, values=part)


def _token_parts(command: GatherSamples, node: int) -> Iterator[SamplePart]:
    for index, source in enumerate(command.sources):
        if source.rollout.location.node == node:
            yield _token_part(index, source.rollout)


def _token_part(index: int, ref: RolloutRef) -> SamplePart:
    try:
        return SamplePart(index=index, tokens=encode_tokens(read_rollout(ref)))
    except Exception as error:  # as in `_value_part`
        return SamplePart(index=index, problem=describe(error))


def encode_tokens(rollout: Rollout) -> TokenPart:
    """Return the tokens of a rollout with the log-probabilities of the policy that sampled them."""
    segments = tuple(
        SegmentPart(
            role=segment.role,
            version=segment.version,
            trainable=segment.trainable,
            length=len(segment.tokens),
        )
        for segment in rollout.segments
    )
    tokens = [np.asarray(segment.tokens, np.int32) for segment in rollout.segments]
    logprobs = [
        np.full(len(segment.tokens), np.nan) if segment.logprobs is None else segment.logprobs
        for segment in rollout.segments
    ]
    return TokenPart(
        segments=segments,
        tokens=np.concatenate(tokens).tobytes(),
        logprobs=np.concatenate(logprobs).astype(np.float32).tobytes(),
    )
