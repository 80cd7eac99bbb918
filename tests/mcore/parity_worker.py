"""Loads, computes losses and one gradient, and exports on one rank for each layout.

test_parallel.py starts it under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()  # before anything of Megatron is imported

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from safetensors.torch import save_file

from megatron_rl.config.schema import ModelSettings, OptimizerSettings
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.packed_batch import PackedBatch
from megatron_rl.mcore.parallel import RankLayout, initialize, shutdown
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights import (
    initialize_hf_weights,
    iterate_hf_weights,
    load_hf_weights,
    save_hf_weights,
)
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView
from tests.mcore.parity_cases import NAN_GRADIENT, PARITY, LayoutCase
from tests.support.packed_sequences import pack, targets_of

GLOBAL_BATCH = [(0, 1), (2, 3), (4, 5), (6, 7)]


def main(checkpoint: Path, out: Path) -> None:
    for name, case in (PARITY | NAN_GRADIENT).items():
        (out / name).mkdir(exist_ok=True)
        run_case(case, initialize(case.parallel, seed=1), checkpoint, out / name)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    shutdown()


def run_case(case: LayoutCase, layout: RankLayout, checkpoint: Path, out: Path) -> None:
    """Write this rank's part of the losses, gradients and exported weights to `out`.

    In a case with NaN it writes the result of the optimizer step instead.
    """
    shape = read_shape(checkpoint)
    models = load_models(case, shape, checkpoint)
    optimizer = DistributedAdam(models, OptimizerSettings(), total_steps=10)
    view = RankView.for_rank(
        shape.num_layers, case.parallel, pp_rank=layout.pp_rank, tp_rank=layout.tp_rank
    )
    optimizer.zero_grad()
    micro_batches = GLOBAL_BATCH[layout.dp_rank :: layout.dp_size]
    losses = run_batch(models, view, shape.moe_layers, micro_batches)
    if case.nan_rank is not None:
        result = step_with_nan(models, optimizer, layout.rank == case.nan_rank)
        (out / str(layout.rank)).write_text(result)
        return
    save_hf_weights(models, shape, source=checkpoint, target=out / "export", dtype=torch.float32)
    save_random_model(case, shape, checkpoint, out / "random")
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True) and layout.tp_rank == 0:
        save_file(losses, out / f"losses-{layout.dp_rank}.safetensors")
    gradients = named_gradients(models, shape)
    if layout.dp_rank == 0 and layout.tp_rank == 0:
        save_file(gradients, out / f"gradients-{layout.pp_rank}.safetensors")


def load_models(case: LayoutCase, shape: ModelShape, checkpoint: Path) -> Sequence[Any]:
    settings = ModelSettings(path=str(checkpoint), recompute=case.recompute)
    models = build_models(shape, settings, case.parallel)
    load_hf_weights(models, shape, checkpoint)
    return wrap_data_parallel(models)


def named_gradients(models: Sequence[Any], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the gradients under Hugging Face names, whatever the layout. Collective."""
    gather_gradients(models)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.copy_(parameter.main_grad)
    return {name: t.clone() for name, t in iterate_hf_weights(models, shape)}


def save_random_model(case: LayoutCase, shape: ModelShape, checkpoint: Path, target: Path) -> None:
    """Save a model from scratch, before data parallelism could broadcast one replica's weights."""
    settings = ModelSettings(path=str(checkpoint), init="random")
    shape = replace(shape, embedding_initializer_range=0.5)
    models = build_models(shape, settings, case.parallel)
    initialize_hf_weights(models, shape, seed=5)
    weights = torch.cat(
        [parameter.detach().flatten() for chunk in models for parameter in chunk.parameters()]
    )
    replicas = parallel_state.get_data_parallel_group()
    if case.parallel.ep == 1:
        copies = [torch.empty_like(weights) for _ in range(dist.get_world_size(replicas))]
        dist.all_gather(copies, weights, group=replicas)
        assert all(torch.equal(copy, weights) for copy in copies)
    save_hf_weights(models, shape, source=checkpoint, target=target, dtype=torch.float32)


def run_batch(
    models: Sequence[Any],
    view: RankView,
    moe_layers: Sequence[int],
    micro_batches: Sequence[tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    """Run this rank's micro-batches forward and backward; returns their losses by name."""
    total = sum(len(targets_of(indices)) for indices in GLOBAL_BATCH)
    losses_by_batch: dict[str, torch.Tensor] = {}

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        targets = targets_of(micro_batches[index])
        losses = tensor_parallel.vocab_parallel_cross_entropy(
            logits[: len(targets)].clone()[:, None], targets[:, None]
        )
        name = "-".join(map(str, micro_batches[index]))
        losses_by_batch[name] = losses.detach().flatten().clone()
        return losses.sum() / total, None

    batches = [local_pack(indices, view, moe_layers) for indices in micro_batches]
    run_schedule(models, batches, loss, forward_only=False, replay=RouteReplay(models))
    return losses_by_batch


def local_pack(indices: tuple[int, ...], view: RankView, moe_layers: Sequence[int]) -> PackedBatch:
    """Pack sequences with the routes of this rank's layers and rows.

    Rows are padded to a multiple of the sequence-parallel size.
    """
    batch = pack(indices, view.moe_rows(moe_layers))
    assert batch.routes is not None
    padding = -batch.num_tokens % view.row_multiple
    if padding:
        filler = torch.tensor([0, 1], dtype=torch.uint8).expand(padding, batch.routes.shape[1], 2)
        batch = replace(
            batch,
            input_ids=torch.cat([batch.input_ids, torch.zeros(1, padding, dtype=torch.int64)], 1),
            position_ids=torch.cat([batch.position_ids, torch.arange(padding)[None]], 1),
            cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + padding]),
            routes=torch.cat([batch.routes, filler]),
        )
    assert batch.routes is not None
    rows = view.input_rows(np.array([0, batch.num_tokens], np.int32))
    return replace(batch, routes=batch.routes[torch.from_numpy(rows)])


def gather_gradients(models: Sequence[Any]) -> None:
    """Gather main_grad on every rank. Collective.

    The distributed optimizer leaves each rank only its shard of the sums.
    """
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            size = dist.get_world_size(buffer.data_parallel_group)
            rank = dist.get_rank(buffer.data_parallel_group)
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.clone().chunk(size))
                dist.all_gather(shards, shards[rank].clone(), group=buffer.data_parallel_group)
                bucket.grad_data.copy_(torch.cat(shards))


def step_with_nan(models: Sequence[Any], optimizer: DistributedAdam, has_nan: bool) -> str:
    """Describe an optimizer step with a NaN on one rank."""
    before = [p.detach().clone() for model in models for p in model.parameters()]
    if has_nan:
        next(models[0].parameters()).main_grad.view(-1)[0] = float("nan")
    # The reduction carries the NaN to the rank that updates this weight.
    for model in models:
        model.finish_grad_sync()
    is_applied = optimizer.step(loss_is_finite=True).is_applied
    after = [p.detach() for model in models for p in model.parameters()]
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return f"applied={is_applied} unchanged={is_unchanged}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
