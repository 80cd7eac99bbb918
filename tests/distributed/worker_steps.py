"""Under torchrun: a real `Worker` trains one step, with a payload exchange across two pretended nodes.

Usage: worker_steps.py CHECKPOINT OUT SCENARIO; scenario `finite`, `nan_on_rank_1`, `nan_logits_on_rank_1` or
`skipped`. Each rank checks itself and rank 0 prints what happened as JSON.
"""

import json
import sys
from pathlib import Path

from megatron_rl.mcore.cpu import compat

compat.install()

import msgspec
import torch

from megatron_rl.contracts.group import RolloutLocation, RolloutRef
from megatron_rl.losses import build_policy_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.model import ParallelSizes, build_models
from megatron_rl.mcore.optimizer import AdamSettings, DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights import load_hf_weights
from megatron_rl.models.qwen3_moe import read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_plan import plan_step
from megatron_rl.rollouts.store import RolloutStore
from megatron_rl.training.batch import Batcher
from megatron_rl.training.collectives import broadcast_bytes
from megatron_rl.training.exchange import Receiver
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.policy import Policy
from megatron_rl.training.worker import Worker
from support.batches import make_batch
from support.engines import route_shape

ADAM = AdamSettings(
    lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=1.0, warmup_steps=1, decay_steps=10,
    decay="constant", min_lr_ratio=1.0,
)  # fmt: skip


def build(checkpoint: str, rollouts: Path) -> Worker:
    sizes = ParallelSizes(ep=2)
    layout = parallel.initialize(sizes, seed=0, timeout_s=60)
    model = read_shape(checkpoint)
    chunks = build_models(model, sizes, dtype=torch.float32)
    load_hf_weights(chunks, model, checkpoint)
    models = wrap_data_parallel(chunks)
    rows = tuple(range(len(model.moe_layers)))
    return Worker(
        layout=layout,
        consumers=[Receiver(dp_rank=rank, node=rank, moe_rows=rows) for rank in range(layout.world_size)],
        model=model,
        policy=Policy(
            models=models,
            logprobs=ResponseLogprobs(temperature=1.0, vocab_size=model.vocab_size, chunk_tokens=64, tp_group=None),
            loss=build_policy_loss("grpo"),
            replay=RouteReplay(models),
        ),
        optimizer=DistributedAdam(models, ADAM),
        batcher=Batcher(RankView.of(num_layers=model.num_layers), route_shape(model), layout.device),
        start_checkpoint=Path(checkpoint),
        rollouts_directory=rollouts,
    )


def store_payloads(worker: Worker, count: int) -> tuple[RolloutStore, list[RolloutRef]]:
    """Every payload lies on node 0, in rank 0's memory; all ranks learn where."""
    samples, rollouts, _ = make_batch(worker.model, count)
    store = RolloutStore(node=0)
    data = None
    if worker.layout.rank == 0:
        data = msgspec.msgpack.encode(store.put("group", rollouts))
    where = msgspec.msgpack.decode(broadcast_bytes(data, worker.layout.control_group), type=list[RolloutLocation])
    return store, [msgspec.structs.replace(s, location=w) for s, w in zip(samples, where, strict=True)]


def weights(worker: Worker) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for m in worker.policy.models for p in m.parameters()])


def main() -> None:
    checkpoint, out, scenario = sys.argv[1:]
    worker = build(checkpoint, Path(out))
    _store, samples = store_payloads(worker, 9)
    advantages = [0.0 if scenario == "skipped" else (-1.0) ** i for i in range(len(samples))]
    plan = plan_step(3, samples, advantages, dp_size=2, optimizer_steps=2, tokens_per_micro_batch=64)
    if scenario == "nan_on_rank_1":
        poisoned = plan.optimizer_steps[0].micro_batches[1][0][0]
        broken = tuple(float("nan") if i == poisoned else a for i, a in enumerate(plan.advantages))
        plan = msgspec.structs.replace(plan, advantages=broken)
    if scenario == "nan_logits_on_rank_1" and worker.layout.rank == 1:
        with torch.no_grad():
            next(p for n, p in worker.policy.models[-1].named_parameters() if "final_layernorm" in n).fill_(torch.nan)
    before = weights(worker)
    outcome = worker.train(plan)
    unchanged = torch.equal(torch.nan_to_num(before), torch.nan_to_num(weights(worker)))
    assert unchanged == (scenario != "finite"), f"rank {worker.layout.rank}: weights unchanged is {unchanged}"
    if worker.layout.rank == 0:
        steps = outcome.optimizer_steps
        described = {"finite": outcome.finite, "optimizer_steps": steps, "metrics": outcome.metrics.values()}
        print("RESULT " + json.dumps(described), flush=True)
    torch.distributed.barrier()
    parallel.shutdown()


if __name__ == "__main__":
    main()
