"""Trains steps whose collectives overlap with passes, and steps whose collectives do not.

Runs under torchrun. Usage: overlapping_steps.py OUT GRID,DTYPE...

Rank 0 writes OUT: for each case and setting, what a run can see of its steps.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.schema import ModelSettings, OptimizerSettings, ParallelSettings
from megatron_rl.mcore import optimizer as optimizer_module
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.packed_batch import PackedBatch
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights import OwnedWeights, load_hf_weights
from megatron_rl.models.families import read_shape
from tests.support.packed_sequences import pack, targets_of
from tests.support.policies import COLUMN_ADDITION

GRIDS: dict[str, dict[str, Any]] = {
    "dp": {},
    "ep2": {"ep": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
}
# The tiny model then has several buckets.
BUCKET = 20_000
MICRO_BATCHES = (4, 2, 2)
SHAPE = read_shape(COLUMN_ADDITION)


class GatherCount(TorchDispatchMode):
    """Counts the collectives that gather weights."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += func._schema.name.startswith("c10d::allgather_into_tensor_coalesced")
        return func(*args, **(kwargs or {}))


class Trainer:
    """A model and its optimizer on one rank."""

    def __init__(
        self, grid: ParallelSettings, layout: RankLayout, dtype: Any, *, overlap: bool
    ) -> None:
        settings = ModelSettings(path=str(COLUMN_ADDITION), dtype=dtype)
        chunks = build_models(SHAPE, settings, grid)
        load_hf_weights(chunks, SHAPE, COLUMN_ADDITION)
        self.layout = layout
        self.models = wrap_data_parallel(chunks, overlap=overlap)
        self.adam = DistributedAdam(
            self.models, OptimizerSettings(lr=1e-2, clip_grad=1e9), total_steps=9
        )

    def step(self, seed: int, micro_batches: int) -> float:
        """Take one step with gradients of every replica's own batches. Returns their norm."""
        indices = self._indices(seed, micro_batches)
        self.adam.zero_grad()

        def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
            targets = targets_of(indices[index]) % SHAPE.vocab_size
            return torch.nn.functional.cross_entropy(logits.float(), targets) / micro_batches, None

        run_schedule(self.models, [packed(i) for i in indices], loss, forward_only=False)
        result = self.adam.step(loss_is_finite=True)
        assert result.is_applied
        return result.grad_norm

    def logits(self) -> str:
        """Return a digest of the logits of a pass without gradients, on the last stage."""
        indices = self._indices(100, MICRO_BATCHES[0])

        def keep(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
            return None, logits.detach().clone()

        return digest(
            run_schedule(self.models, [packed(i) for i in indices], keep, forward_only=True)
        )

    def weights(self) -> str:
        """Return a digest of all weights, as rank 0 exports them."""
        weights = OwnedWeights(self.models, SHAPE, self.layout, None, iter, bucket_bytes=1 << 20)
        return digest([tensor.clone() for _, tensor in weights.stream_all()])

    def _indices(self, seed: int, micro_batches: int) -> list[tuple[int, ...]]:
        """Return the sequences of each micro-batch of this replica. The last one has only one."""
        first = 1000 * seed + 100 * self.layout.dp_rank
        packs = [(first + 2 * i, first + 2 * i + 1) for i in range(micro_batches - 1)]
        return [*packs, (first + 50,)]


def packed(indices: Sequence[int]) -> PackedBatch:
    """Pack sequences of the model's tokens."""
    batch = pack(indices)
    return replace(batch, input_ids=batch.input_ids % SHAPE.vocab_size)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of the tensors of all ranks. Collective."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().float().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, total.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def train(
    grid: ParallelSettings, layout: RankLayout, dtype: str, *, overlap: bool
) -> dict[str, Any]:
    """Take steps, look at them as a run does, save a checkpoint and go on from it.

    The run that goes on from it has another setting.
    """
    trainer = Trainer(grid, layout, dtype, overlap=overlap)
    buckets = [len(model.bucket_groups) for model in trainer.models]
    seen: dict[str, Any] = {"norms": [], "logits": [], "weights": []}
    for step, micro_batches in enumerate(MICRO_BATCHES):
        seen["norms"].append(trainer.step(step, micro_batches))
        if step != 1:  # a pass comes first, or the export does
            seen["logits"].append(trainer.logits())
        trainer.adam.complete_weights()
        seen["weights"].append(trainer.weights())
        seen["logits"].append(trainer.logits())
    checkpoint = _shared_folder(layout)
    write_tensors(gather_tensors(trainer.models, trainer.adam), checkpoint, layout.control_group)
    dist.barrier()  # rank 0 writes the description last
    resumed = Trainer(grid, layout, dtype, overlap=not overlap)
    load_tensors(
        resumed.models,
        resumed.adam,
        checkpoint,
        optimizer_steps=len(MICRO_BATCHES),
        group=layout.control_group,
    )
    gathers = [last_step(each, seen) for each in (trainer, resumed)]
    assert seen["weights"][-1] == seen["weights"][-2]
    return {"seen": seen, "buckets": buckets, "gathers": gathers[0]}


def last_step(trainer: Trainer, seen: dict[str, Any]) -> int:
    """Take one more step. Returns how many buckets of weights were gathered."""
    with GatherCount() as gathers:
        seen["norms"].append(trainer.step(9, MICRO_BATCHES[0]))
        trainer.adam.complete_weights()
    seen["weights"].append(trainer.weights())
    return gathers.calls


def _shared_folder(layout: RankLayout) -> Path:
    """Return a new folder, the same on all ranks. Collective."""
    names = [tempfile.mkdtemp() if layout.rank == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0]))


def main() -> None:
    out, *cases = sys.argv[1:]
    config: Any = optimizer_module
    config.DistributedDataParallelConfig = partial(
        config.DistributedDataParallelConfig, bucket_size=BUCKET
    )
    results: dict[str, Any] = {}
    for case in cases:
        name, dtype = case.split(",")
        grid = ParallelSettings(**GRIDS[name], timeout_s=60)
        layout = parallel.initialize(grid, seed=0)
        for overlap in (False, True):
            results[f"{name} {dtype} {overlap}"] = train(grid, layout, dtype, overlap=overlap)
        parallel_state.destroy_model_parallel()
        if layout.rank == 0:
            Path(out).write_text(json.dumps(results))
    parallel.shutdown()


if __name__ == "__main__":
    main()
