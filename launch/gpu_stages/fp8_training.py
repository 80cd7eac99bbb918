"""FP8 matrix products of Transformer Engine in training: steps beside those in bfloat16. No CPU can
run it.
"""

from __future__ import annotations

import time

from megatron_rl.mcore import compat

compat.install()

import torch

from launch.gpu_stages.stage import Report, Setting, Skipped, run
from launch.gpu_stages.workers import (
    ROUTES_OF_NOBODY,
    configure,
    make_rollouts,
    open_worker,
    write_model,
)
from megatron_rl.contracts.launch_facts import has_transformer_engine
from megatron_rl.mcore import parallel
from megatron_rl.planning.step_planner import StepPlanner

_MOST_GRAD_NORM_CHANGE = 0.2  # relative; e4m3 rounds to three bits


def fp8_training(setting: Setting, report: Report) -> None:
    """The same step of the same weights in bfloat16 and with each recipe that this device has."""
    if not (torch.cuda.is_available() and has_transformer_engine()):
        raise Skipped("it needs CUDA and Transformer Engine")
    shape = write_model(setting.scratch / "model", small=False, layers=2, vocabulary=32_000)
    recipes = [
        "null",
        "tensorwise",
        "mxfp8" if torch.cuda.get_device_capability() >= (10, 0) else "blockwise",
    ]
    norms = {}
    for recipe in recipes:
        c = configure(
            setting.scratch / "model",
            setting.scratch,
            "model.spec=te",
            f"model.fp8={recipe}",
            "train.optimizer_steps_per_batch=1",
            ROUTES_OF_NOBODY,
        )
        worker = open_worker(c, setting.scratch)
        _store, refs, advantages = make_rollouts(shape, 8, prompt=64, response=449, seed=0)
        plan = StepPlanner(c.train, c.parallel, dp_size=1, seed=0).plan(0, refs, advantages)
        values = worker.train(plan).metrics.values()
        norms[recipe] = values["train/grad_norm"]
        start = time.perf_counter()
        worker.train(plan)
        torch.cuda.synchronize()
        report.note(f"{recipe} step_s", round(time.perf_counter() - start, 4))
        change = abs(norms[recipe] / norms["null"] - 1)
        report.at_most(f"{recipe} grad_norm_change", change, _MOST_GRAD_NORM_CHANGE)
        parallel.shutdown()


if __name__ == "__main__":
    run(fp8_training)
