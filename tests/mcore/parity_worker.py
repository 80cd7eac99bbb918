"""What one rank of a parity run does: load, log-probabilities, one gradient, export. Started by test_parallel.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.mcore.cpu import compat

compat.install()  # before anything of Megatron is imported

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from safetensors.torch import save_file

from megatron_rl.mcore.model import ParallelSizes, build_models
from megatron_rl.mcore.optimizer import AdamSettings, DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.parallel import initialize, shutdown
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights, save_hf_weights
from megatron_rl.models.qwen3_moe import read_shape
from megatron_rl.planning.rank_view import RankView
from tests.mcore.packs import pack, targets_of

GLOBAL_BATCH = [(0, 1), (2, 3), (4, 5), (6, 7)]
MOE_LAYERS = (0, 2, 3)


def gather_gradients(models: Sequence[Any]) -> None:
    """Make main_grad whole on every rank: the distributed optimizer leaves each rank only its shard of the sums."""
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            size = dist.get_world_size(buffer.data_parallel_group)
            rank = dist.get_rank(buffer.data_parallel_group)
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.clone().chunk(size))
                dist.all_gather(shards, shards[rank].clone(), group=buffer.data_parallel_group)
                bucket.grad_data.copy_(torch.cat(shards))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("tp", "pp", "vpp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--poison-rank", type=int, default=-1)
    args = parser.parse_args()
    sizes = ParallelSizes(args.tp, args.pp, args.vpp, 1, args.ep, args.etp, args.sequence_parallel)
    layout = initialize(sizes, seed=1, timeout_s=60)
    config = read_shape(args.checkpoint)
    bare = build_models(config, sizes, dtype=torch.float32, recompute=args.recompute)
    load_hf_weights(bare, config, args.checkpoint)
    models = wrap_data_parallel(bare)
    optimizer = DistributedAdam(models, AdamSettings(1e-3, (0.9, 0.95), 1e-8, 0.0, 1.0, 0, 10, "constant", 0.1))
    replay = RouteReplay(models)

    view = RankView.of(
        num_layers=4,
        pp_rank=layout.pp_rank,
        pp_size=args.pp,
        vpp_size=args.vpp,
        tp_rank=layout.tp_rank,
        tp_size=args.tp,
        sequence_parallel=args.sequence_parallel,
    )
    mine = GLOBAL_BATCH[layout.dp_rank :: layout.dp_size]
    batches = [local_pack(indices, view) for indices in mine]
    total = sum(len(targets_of(indices)) for indices in GLOBAL_BATCH)
    kept: dict[str, torch.Tensor] = {}

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        targets = targets_of(mine[index])
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits[: len(targets)].clone()[:, None], targets[:, None])
        kept["-".join(map(str, mine[index]))] = losses.detach().flatten().clone()
        return losses.sum() / total, None

    optimizer.zero_grad()
    run_schedule(models, batches, loss, forward_only=False, replay=replay)
    if args.poison_rank >= 0:
        before = [p.detach().clone() for model in models for p in model.parameters()]
        if layout.rank == args.poison_rank:
            next(models[0].parameters()).main_grad.view(-1)[0] = float("nan")
        stepped = optimizer.step(loss_is_finite=True).stepped
        after = [p.detach() for model in models for p in model.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        (args.out / f"poison-{layout.rank}").write_text(f"stepped={stepped} unchanged={same}")
    else:
        write_results(args, models, config, layout, kept)
    dist.barrier()
    shutdown()


def local_pack(indices: tuple[int, ...], view: RankView) -> Any:
    """Pack `indices` for this rank: its layers, rows padded to a multiple of the sequence-parallel size and sliced."""
    from dataclasses import replace

    import numpy as np

    batch = pack(indices, view.moe_rows(MOE_LAYERS))
    padding = -batch.num_tokens % view.row_multiple
    if padding:
        zeros = torch.zeros(1, padding, dtype=torch.int64)
        assert batch.routes is not None
        filler = torch.tensor([0, 1], dtype=torch.uint8).expand(padding, batch.routes.shape[1], 2)
        bounds = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + padding])
        batch = replace(
            batch,
            input_ids=torch.cat([batch.input_ids, zeros], 1),
            position_ids=torch.cat([batch.position_ids, torch.arange(padding)[None]], 1),
            cu_seqlens=bounds,
            routes=torch.cat([batch.routes, filler]),
        )
    assert batch.routes is not None
    rows = view.input_rows(np.array([0, batch.num_tokens], np.int32))
    return replace(batch, routes=batch.routes[torch.from_numpy(rows)])


def write_results(
    args: argparse.Namespace, models: Sequence[Any], config: Any, layout: Any, kept: dict[str, torch.Tensor]
) -> None:
    save_hf_weights(models, config, source=args.checkpoint, target=args.out / "export", dtype=torch.float32)
    if layout.is_last_stage and layout.tp_rank == 0:
        save_file(kept, args.out / f"losses-{layout.dp_rank}.safetensors")
    gather_gradients(models)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.copy_(parameter.main_grad)
    # the iterator gives gradients their Hugging Face names, whatever the layout
    gradients = {name: t.clone() for name, t in iterate_hf_weights(models, config)}
    source = layout.dp_rank == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    if source:
        save_file(gradients, args.out / f"gradients-{layout.pp_rank}.safetensors")


if __name__ == "__main__":
    main()
