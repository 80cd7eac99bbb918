"""Trains tiny models on the CPU for two clipped steps, and prints digests of their weights.

Arguments: the folders of their checkpoints. Each is trained in float32 and in bfloat16.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.config.schema import ModelSettings, OptimizerSettings, ParallelSettings
from megatron_rl.mcore import parallel
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights import load_hf_weights
from megatron_rl.models.families import read_shape
from tests.support.packed_sequences import pack, targets_of

SEQUENCES = (0, 1, 2)


def train(checkpoint: Path, dtype: Any) -> list[torch.nn.Parameter]:
    """Return the weights after two steps with dropout and recomputation."""
    shape = read_shape(checkpoint)
    settings = ModelSettings(
        path=str(checkpoint), dtype=dtype, recompute="full", hidden_dropout=0.1
    )
    models = build_models(shape, settings, ParallelSettings())
    load_hf_weights(models, shape, checkpoint)
    models = list(wrap_data_parallel(models))
    optimizer = DistributedAdam(models, OptimizerSettings(clip_grad=1e-3), total_steps=2)
    for _ in range(2):
        optimizer.zero_grad()
        run_schedule(models, [pack(SEQUENCES)], _loss, forward_only=False)
        assert optimizer.step(loss_is_finite=True).is_applied
    return list(models[0].parameters())


def _loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
    return torch.nn.functional.cross_entropy(logits.float(), targets_of(SEQUENCES)), None


if __name__ == "__main__":
    parallel.initialize(ParallelSettings(timeout_s=60), seed=1)
    for folder in sys.argv[1:]:
        for dtype in ("float32", "bfloat16"):
            digest = hashlib.sha256()
            for weight in train(Path(folder), dtype):
                digest.update(weight.detach().float().numpy().tobytes())
            print(Path(folder).name, dtype, digest.hexdigest())
    parallel.shutdown()
