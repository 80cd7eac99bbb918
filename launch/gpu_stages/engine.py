"""A real engine beside the trainer: it is given weights and draws, the trainer recomputes what it
drew, and again.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import numpy as np
import torch

from launch.gpu_stages.stage import Report, Setting, Skipped, run
from launch.gpu_stages.workers import configure, open_worker, write_model
from launch.testbed.rollout_refs import make_ref
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason, Rollout
from megatron_rl.engines.open_weight_sync import open_weight_sync
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.environments.rollout_builder import RolloutBuilder
from megatron_rl.mcore import parallel
from megatron_rl.models.route_shape import route_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.rollouts.store import RolloutStore
from megatron_rl.training.worker import Worker
from sglang_bridge.client import GenerateClient
from sglang_bridge.keys import create_keys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings

_LIMIT = {"float32": 5e-5, "bfloat16": 0.05}  # nats, the mean
_MOST_DISAGREEMENT = {
    "float32": 0.01,
    "bfloat16": 0.5,
}  # routers with random weights are easily tipped
PROMPTS, TOKENS = 16, 32


def engine(setting: Setting, report: Report) -> None:
    """Sync, draw, train; twice, so that the second draw is from trained weights."""
    if importlib.util.find_spec("sglang") is None:
        raise Skipped("sglang is not installed")
    shape = write_model(setting.scratch / "model", small=setting.small, layers=2, vocabulary=512)
    c = configure(
        setting.scratch / "model",
        setting.scratch,
        "sync.transport=disk",
        "train.optimizer_steps_per_batch=1",
        f"rollout.max_new_tokens={TOKENS}",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=0",
    )
    worker = open_worker(c, setting.scratch)
    worker.save(setting.scratch / "start")
    lifeline = Lifeline()
    server = _start(c, setting.scratch, lifeline)
    try:
        server.wait_healthy(c.engine.start_timeout_s)
        sync = open_weight_sync(
            [server.engine],
            server.keys,
            c.sync,
            c.engine,
            shape,
            directory=setting.scratch / "sync",
            model_path=setting.scratch / "start",
            device=worker.layout.device,
        )
        for step in (0, 1):
            _step(step, worker, server, sync, c, shape, report)
        sync.close()
    finally:
        server.stop()
        lifeline.close()
    parallel.shutdown()


def _start(c: Configuration, scratch: Path, lifeline: Lifeline) -> ManagedEngine:
    on_gpu = torch.cuda.is_available()
    settings = ServerSettings(
        dtype=c.model.dtype, max_running_requests=PROMPTS, max_total_tokens=8192
    )
    place = ServerPlace(
        model_path=str(scratch / "start"),
        device="cuda" if on_gpu else "cpu",
        gpus=(0,) if on_gpu else (),
    )
    return ManagedEngine.start(
        settings, place, keys=create_keys(), log_path=scratch / "engine.log", lifeline=lifeline
    )


def _step(
    step: int,
    worker: Worker,
    server: ManagedEngine,
    sync: WeightSync,
    c: Configuration,
    shape: ModelShape,
    report: Report,
) -> None:
    said = sync.send(sync.next_command(), worker.export())
    report.note(f"step {step} audited", said.get("sync/audit_compared", sync.audit_obstacle or 0))
    rollouts = draw(server, shape, step)
    store = RolloutStore(node=0)
    refs = [
        make_ref(r, where) for r, where in zip(rollouts, store.put("drawn", rollouts), strict=True)
    ]
    plan = StepPlanner(c.train, c.parallel, dp_size=1, seed=0).plan(
        step, refs, [(-1.0) ** i for i in range(len(refs))]
    )
    values = worker.train(plan).metrics.values()
    mean = values["mismatch/logprob_abs_mean"]
    report.at_most(f"step {step} logprob_abs_mean", mean, _LIMIT[worker.model.dtype])
    report.at_most(
        f"step {step} route_disagreement",
        values["mismatch/route_disagreement"],
        _MOST_DISAGREEMENT[worker.model.dtype],
    )
    report.holds(f"step {step} learns", values["train/grad_norm"] > 0)


def draw(server: ManagedEngine, shape: ModelShape, seed: int) -> list[Rollout]:
    """A response to each of some random prompts, with its routes."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(t) for t in rng.integers(2, shape.vocab_size, 12)) for _ in range(PROMPTS)]
    sampling = Sampling(max_new_tokens=TOKENS, temperature=1.0)

    async def all_of_them() -> list[Rollout]:
        layers = (shape.num_layers, shape.topk)
        async with GenerateClient(
            server.url, api_key=server.keys.api_key, deadline_seconds=120, route_shape=layers
        ) as client:
            requests = [
                client.generate(ids, sampling, rid=f"{seed}-{i}") for i, ids in enumerate(prompts)
            ]
            generations = await asyncio.gather(*requests)
        drawn = []
        for index, (ids, generation) in enumerate(zip(prompts, generations, strict=True)):
            prompt = Prompt(id=f"p{index}", token_ids=ids, answer="", task="t")
            draft = RolloutBuilder(f"{seed}-{index}", prompt, 0, route_shape(shape))
            draft.sample(generation)
            drawn.append(draft.rollout(FinishReason.STOP, trainable=True))
        return drawn

    return asyncio.run(all_of_them())


if __name__ == "__main__":
    run(engine)
