"""Opens the weights of a model as the engines of a run hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.config.schema import EngineSettings
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.job import Job
from megatron_rl.mcore.weights.fp8_weights import (
    check_part,
    complete,
    fp8_weights_of,
    quantize_weights,
)
from megatron_rl.mcore.weights.owned_export import OwnedWeights
from megatron_rl.models.shape import ModelShape
from sglang_bridge.weights.buckets import NamedTensors


def open_engine_weights(
    models: Sequence[torch.nn.Module],
    shape: ModelShape,
    job: Job,
    engine: EngineSettings,
    *,
    bucket_bytes: int,
) -> OwnedWeights:
    """Return the weights in the engines' dtype, quantized if `engine` says so.

    models: this rank's chunks. bucket_bytes: of the buckets to rank 0.
    """
    dtype = torch_dtype(engine.dtype)
    names = fp8_weights_of(engine, shape)

    def transform(weights: NamedTensors) -> NamedTensors:
        if names is None:
            return weights
        # Owners gather shards before this, so that no shard cuts a block
        return check_part(quantize_weights(weights, names), names, dtype)

    def check(weights: NamedTensors) -> NamedTensors:
        return weights if names is None else complete(weights, names, dtype)

    return OwnedWeights(
        models, shape, job, dtype, transform, bucket_bytes=bucket_bytes, complete=check
    )
