"""Rehearse every model class on the pretended device, and print one table.

    python -m tests.lab.pretended_device tests.lab.pretended_device.families
    python -m tests.lab.pretended_device tests.lab.pretended_device.families OUT.json CASE...

A tiny random checkpoint of each class is loaded, exported and trained for one optimizer step with
recomputation, and with replayed routes if it has experts. Without the first module, the same runs
on the CPU. OUT.json gets the table and a hash of all weights after the step. CASE: a class
and a dtype, such as qwen3-bfloat16; without any, all. Exit code: 0, or 1 if a class fails.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch
from safetensors.torch import load_file

from megatron_rl.config.algorithms import EspoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.mcore import parallel
from megatron_rl.mcore.optimizer import DistributedAdam, StepResult
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.weights import iterate_hf_weights
from megatron_rl.models.shape import ModelShape
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy
from tests.support.batches import make_batch
from tests.support.policies import ADAM, make_batcher, make_policy
from tests.support.tiny_families import FAMILIES, randomize_weights

_GRID = ParallelSettings(timeout_s=60)
_DTYPES = ("float32", "bfloat16")
_ROLLOUTS = 4


@dataclass(frozen=True)
class Row:
    """The rehearsal of one model class in one dtype.

    loads_and_exports: the export equals the checkpoint bit for bit. is_applied, grad_norm: of the
    optimizer step. weights: the hash of all weights afterwards.
    """

    family: str
    dtype: str
    device: str
    loads_and_exports: bool
    is_applied: bool
    grad_norm: float
    weights: str

    @property
    def is_ok(self) -> bool:
        """True if everything worked."""
        has_gradient = math.isfinite(self.grad_norm) and self.grad_norm > 0
        return self.loads_and_exports and self.is_applied and has_gradient


def rehearse_family(family: str, dtype: str, layout: RankLayout, directory: Path) -> Row:
    """Load, export and train one model class."""
    torch.manual_seed(0)  # of the first weights
    randomize_weights(FAMILIES[family]()).save_pretrained(directory)
    shape, policy = make_policy(directory, _GRID, EspoSettings(), dtype=dtype, recompute="full")
    original = load_file(directory / "model.safetensors")
    export = export_of(policy, shape)
    is_same = export.keys() == original.keys() and all(
        torch.equal(tensor, original[name].to(tensor.dtype)) for name, tensor in export.items()
    )
    result = train(policy, shape, layout)
    digest = hashlib.sha256()
    for name, tensor in sorted(export_of(policy, shape).items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return Row(
        family=family,
        dtype=dtype,
        device=layout.device.type,
        loads_and_exports=is_same,
        is_applied=result.is_applied,
        grad_norm=result.grad_norm,
        weights=digest.hexdigest()[:16],
    )


def export_of(policy: Policy, shape: ModelShape) -> dict[str, torch.Tensor]:
    """The weights under their Hugging Face names, on the CPU."""
    weights = iterate_hf_weights(policy.models, shape)
    return {name: tensor.cpu().clone() for name, tensor in weights}


def train(policy: Policy, shape: ModelShape, layout: RankLayout) -> StepResult:
    """Run the old-policy pass and one optimizer step over two micro-batches."""
    optimizer = DistributedAdam(policy.models, ADAM, total_steps=10)
    batcher = make_batcher(shape, _GRID, layout)
    _, rollouts, advantages = make_batch(shape, _ROLLOUTS)
    batches = [
        batcher.pack(rollouts[i : i + 2], advantages[i : i + 2]) for i in range(0, _ROLLOUTS, 2)
    ]
    metrics = MetricSums()
    objectives = compute_old_policy(policy, batches, metrics)
    return update_policy(
        policy,
        optimizer,
        batches,
        objectives,
        Denominators(sequences=float(_ROLLOUTS), tokens=100.0),
        dp_size=1,
        first_step=True,
        metrics=metrics,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of the table."""
    lines = [f"{'model class':<40}{'dtype':<10}{'device':<8}{'load, export':<14}{'step':<10}norm"]
    for row in rows:
        export = "equal bits" if row.loads_and_exports else "DIFFERS"
        step = "applied" if row.is_applied else "REFUSED"
        line = f"{row.family:<40}{row.dtype:<10}{row.device:<8}{export:<14}{step:<10}"
        lines.append(f"{line}{row.grad_norm:.4f}")
    return lines


def main() -> int:
    """Rehearse every class in both dtypes. Returns the exit code."""
    names = sys.argv[2:]
    cases = [(family, dtype) for family in FAMILIES for dtype in _DTYPES]
    layout = parallel.initialize(_GRID, seed=0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family, dtype in cases:
            name = f"{family}-{dtype}"
            if not names or name in names:
                rows.append(rehearse_family(family, dtype, layout, Path(folder) / name))
    parallel.shutdown()
    print("\n".join(table(rows)))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(not all(row.is_ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
