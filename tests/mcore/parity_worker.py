"""What one rank does for each layout: load, log-probabilities, one gradient, export. Started by
test_parallel.py.
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

from launch.testbed.packed_sequences import pack, targets_of
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
from tests.mcore.parity_cases import PARITY, POISONED, LayoutCase

GLOBAL_BATCH = [(0, 1), (2, 3), (4, 5), (6, 7)]


def main(checkpoint: Path, out: Path) -> None:
    for name, case in (PARITY | POISONED).items():
        (out / name).mkdir(exist_ok=True)
        run_case(case, initialize(case.parallel, seed=1), checkpoint, out / name)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    shutdown()


def run_case(case: LayoutCase, layout: RankLayout, checkpoint: Path, out: Path) -> None:
    """Write this rank's part of the losses, gradients and exported weights, or what a poisoned step
    did, to `out`.
    """
    shape = read_shape(checkpoint)
    bare = build_models(
        shape, ModelSettings(path=str(checkpoint), recompute=case.recompute), case.parallel
    )
    load_hf_weights(bare, shape, checkpoint)
    models = wrap_data_parallel(bare)
    optimizer = DistributedAdam(models, OptimizerSettings(), total_steps=10)
    view = RankView.for_rank(
        shape.num_layers, case.parallel, pp_rank=layout.pp_rank, tp_rank=layout.tp_rank
    )
    optimizer.zero_grad()
    losses = run_batch(
        models, view, shape.moe_layers, GLOBAL_BATCH[layout.dp_rank :: layout.dp_size]
    )
    if case.poisoned_rank is not None:
        (out / str(layout.rank)).write_text(
            poisoned_step(models, optimizer, layout.rank == case.poisoned_rank)
        )
        return
    save_hf_weights(models, shape, source=checkpoint, target=out / "export", dtype=torch.float32)
    save_drawn(case, shape, checkpoint, out / "drawn")
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True) and layout.tp_rank == 0:
        save_file(losses, out / f"losses-{layout.dp_rank}.safetensors")
    gather_gradients(models)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.copy_(parameter.main_grad)
    # the iterator gives gradients their Hugging Face names, whatever the layout
    gradients = {name: t.clone() for name, t in iterate_hf_weights(models, shape)}
    if layout.dp_rank == 0 and layout.tp_rank == 0:
        save_file(gradients, out / f"gradients-{layout.pp_rank}.safetensors")


def save_drawn(case: LayoutCase, shape: ModelShape, checkpoint: Path, target: Path) -> None:
    """A model from scratch, before data parallelism could make replicas equal that are not."""
    fresh = build_models(
        shape, ModelSettings(path=str(checkpoint), init="random", embedding_std=0.5), case.parallel
    )
    initialize_hf_weights(fresh, shape, seed=5)
    ours = torch.cat(
        [parameter.detach().flatten() for chunk in fresh for parameter in chunk.parameters()]
    )
    replicas = parallel_state.get_data_parallel_group()
    if case.parallel.ep == 1:
        copies = [torch.empty_like(ours) for _ in range(dist.get_world_size(replicas))]
        dist.all_gather(copies, ours, group=replicas)
        assert all(torch.equal(copy, ours) for copy in copies)
    save_hf_weights(fresh, shape, source=checkpoint, target=target, dtype=torch.float32)


def run_batch(
    models: Sequence[Any],
    view: RankView,
    moe_layers: Sequence[int],
    mine: Sequence[tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    """Forward and backward over this rank's micro-batches; the losses of each micro-batch by its
    name.
    """
    total = sum(len(targets_of(indices)) for indices in GLOBAL_BATCH)
    kept: dict[str, torch.Tensor] = {}

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        targets = targets_of(mine[index])
        losses = tensor_parallel.vocab_parallel_cross_entropy(
            logits[: len(targets)].clone()[:, None], targets[:, None]
        )
        kept["-".join(map(str, mine[index]))] = losses.detach().flatten().clone()
        return losses.sum() / total, None

    batches = [local_pack(indices, view, moe_layers) for indices in mine]
    run_schedule(models, batches, loss, forward_only=False, replay=RouteReplay(models))
    return kept


def local_pack(indices: tuple[int, ...], view: RankView, moe_layers: Sequence[int]) -> PackedBatch:
    """Pack `indices` for this rank: its layers, rows padded to a multiple of the sequence-parallel
    size and sliced.
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
    """Make main_grad whole on every rank: the distributed optimizer leaves each rank only its shard
    of the sums.
    """
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            size = dist.get_world_size(buffer.data_parallel_group)
            rank = dist.get_rank(buffer.data_parallel_group)
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.clone().chunk(size))
                dist.all_gather(shards, shards[rank].clone(), group=buffer.data_parallel_group)
                bucket.grad_data.copy_(torch.cat(shards))


def poisoned_step(models: Sequence[Any], optimizer: DistributedAdam, poisoned: bool) -> str:
    """What an optimizer step did after a NaN appeared on one rank."""
    before = [p.detach().clone() for model in models for p in model.parameters()]
    if poisoned:
        next(models[0].parameters()).main_grad.view(-1)[0] = float("nan")
    stepped = optimizer.step(loss_is_finite=True).is_applied
    after = [p.detach() for model in models for p in model.parameters()]
    return f"stepped={stepped} unchanged={all(torch.equal(a, b) for a, b in zip(before, after, strict=True))}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
