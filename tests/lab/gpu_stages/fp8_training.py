"""Training steps with FP8 matrix products of Transformer Engine beside steps in bfloat16.

No CPU can run it.
"""

from __future__ import annotations

import time

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.mcore import parallel
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.step_planner import StepPlanner
from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped, run
from tests.support.layer_specs import te_obstacle
from tests.support.workers import (
    ALLOW_RANDOM_ROUTES,
    configure,
    make_rollouts,
    open_worker,
    write_model,
)

# Largest relative change; e4m3 rounds to three bits
_MAX_GRAD_NORM_CHANGE = 0.2


def fp8_training(setting: Setting, report: Report) -> None:
    """Train the same step of the same weights in bfloat16 and with each recipe of this device."""
    if obstacle := te_obstacle():
        raise StageSkipped(f"no layers of Transformer Engine: {obstacle}")
    shape = write_model(setting.scratch / "model", small=False, layers=2, vocabulary=32_000)
    is_blackwell = torch.cuda.get_device_capability() >= (10, 0)
    reference = _train_with("null", setting, shape, report)
    for recipe in ("tensorwise", "mxfp8" if is_blackwell else "blockwise"):
        with report.part(recipe):
            change = abs(_train_with(recipe, setting, shape, report) / reference - 1)
            report.require_at_most(f"{recipe} grad_norm_change", change, _MAX_GRAD_NORM_CHANGE)


def _train_with(recipe: str, setting: Setting, shape: ModelShape, report: Report) -> float:
    """Train two steps and note the seconds of the second. Returns the first gradient norm."""
    c = configure(
        setting.scratch / "model",
        setting.scratch,
        "model.spec=te",
        f"model.fp8={recipe}",
        "train.optimizer_steps_per_batch=1",
        ALLOW_RANDOM_ROUTES,
    )
    try:
        worker = open_worker(c, setting.scratch)
        _store, refs, advantages = make_rollouts(shape, 8, prompt=64, response=449, seed=0)
        plan = StepPlanner(c.train, c.parallel, dp_size=1, seed=0).plan(0, refs, advantages)
        grad_norm = worker.train(plan).metrics.values()["train/grad_norm"]
        start = time.perf_counter()
        worker.train(plan)
        torch.cuda.synchronize()
        report.note(f"{recipe} step_s", round(time.perf_counter() - start, 4))
        return grad_norm
    finally:
        parallel.shutdown()


if __name__ == "__main__":
    run(fp8_training)
