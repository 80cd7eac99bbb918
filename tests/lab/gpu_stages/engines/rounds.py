"""Rounds of an engine and the trainer: weights, audit, sampling and training.

Both rounds are the same, the second one with trained weights.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_rl.mcore import compat

compat.install()

import numpy as np

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason, Rollout
from megatron_rl.engines.members import Members
from megatron_rl.engines.weight_sync import WeightSync, open_weight_sync
from megatron_rl.environments.rollout_builder import RolloutBuilder
from megatron_rl.mcore import parallel
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.rollouts.wire.store import RolloutStore
from megatron_rl.training.worker import Worker
from sglang_bridge.client import GenerateClient
from sglang_bridge.generation import Generation
from sglang_bridge.keys import create_keys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.expectation import WeightExpectation
from tests.lab.gpu_stages.stage import Report, Setting
from tests.support.rollout_refs import make_ref
from tests.support.workers import configure, open_worker, write_model

# Largest mean difference of log-probabilities, in nats
_MAX_LOGPROB_DIFFERENCE = {"float32": 5e-5, "bfloat16": 0.05}
# Routers with random weights have close scores, so that rounding changes many choices.
_MAX_ROUTE_DISAGREEMENT = {"float32": 0.01, "bfloat16": 0.5}
# For both steps, once the engine is healthy
_STEP_SECONDS = 75.0
# A CPU loads and samples it in seconds. Its heads have a size that CUDA's attention takes.
_CPU_MODEL = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 32,
}
_MAX_THREADS = 8
PROMPTS = 16
TOKENS = 32


def run_rounds(
    setting: Setting, report: Report, *, device: Literal["cpu", "cuda"], dtype: str
) -> None:
    """Start an engine on `device`, then send weights, generate and train, twice.

    dtype: of trainer and engine.
    """
    c = _configure(setting, device, dtype)
    worker = open_worker(c, setting.scratch)
    worker.save(setting.scratch / "start")
    report.note("dtype", dtype)
    report.note("trainer", worker.layout.device.type)
    report.note("engine", device)
    lifeline = Lifeline()
    server = _start(c, setting, device, lifeline)
    try:
        server.wait_healthy(min(c.engine.start_timeout_s, setting.longest_wait(then=_STEP_SECONDS)))
        report.note("engine_start_s", round(server.age_seconds, 1))
        sync = _open_sync(server, worker, c, setting.scratch)
        for step in (0, 1):
            _send_weights(step, worker, sync, report)
            _audit(step, worker, server, device, report)
            _train(step, worker, server, c, report)
        sync.close()
    except Exception:
        print(server.log_tail(200))
        raise
    finally:
        server.stop()
        lifeline.close()
    parallel.shutdown()


def _configure(setting: Setting, device: Literal["cpu", "cuda"], dtype: str) -> Configuration:
    """Write the model, and configure a run over it."""
    model = setting.scratch / "model"
    changes = _CPU_MODEL if device == "cpu" and not setting.small else {}
    write_model(model, small=setting.small, layers=2, vocabulary=512, **changes)
    return configure(
        model,
        setting.scratch,
        "sync.transport=disk",
        f"sync.timeout_s={_STEP_SECONDS / 3:g}",
        "train.optimizer_steps_per_batch=1",
        f"rollout.max_new_tokens={TOKENS}",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=0",
        dtype=dtype,
    )


def _open_sync(
    server: ManagedEngine, worker: Worker, c: Configuration, scratch: Path
) -> WeightSync:
    members = Members()
    members.add(server.url, server.engine)
    members.answer(server.url, 0)
    return open_weight_sync(
        members,
        server.keys,
        c.sync,
        c.engine,
        worker.shape,
        directory=scratch / "sync",
        model_path=scratch / "start",
        job=worker.layout,
        log=print,
    )


def _start(
    c: Configuration, setting: Setting, device: Literal["cpu", "cuda"], lifeline: Lifeline
) -> ManagedEngine:
    # On a CPU with many cores, one thread takes most of the stage's time.
    threads = 1 if setting.small else min(_MAX_THREADS, os.cpu_count() or 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    settings = ServerSettings(
        dtype=c.model.dtype, max_running_requests=PROMPTS, max_total_tokens=8192
    )
    place = ServerPlace(
        model_path=str(setting.scratch / "start"),
        device=device,
        gpus=(0,) if device == "cuda" else (),
    )
    return ManagedEngine.start(
        settings,
        place,
        keys=create_keys(),
        log_path=setting.scratch / "engine.log",
        lifeline=lifeline,
    )


def _send_weights(step: int, worker: Worker, sync: WeightSync, report: Report) -> None:
    metrics = sync.send(sync.next_command(), worker.export())
    report.require_at_most(
        f"step {step}: engines without the weights", 1 - metrics["sync/engines"], 0
    )


def _audit(
    step: int,
    worker: Worker,
    server: ManagedEngine,
    device: Literal["cpu", "cuda"],
    report: Report,
) -> None:
    """Compare the engine's checksums with the trainer's weights.

    `WeightSync` compares names alone if the engine is on another kind of device than the trainer.
    """
    expectation = WeightExpectation(
        dtype=torch_dtype(worker.model.dtype),
        num_experts=worker.shape.num_experts,
        device=device,
        num_key_value_heads=worker.shape.num_key_value_heads,
    )
    for name, tensor in worker.export().stream_all():
        expectation.add(name, tensor)
    audit = audit_engine(server.admin(), expectation)
    report.note(f"step {step} weights_compared", audit.num_compared)
    report.require_at_most(f"step {step} weights_that_differ", len(audit.mismatches), 0)


def _train(
    step: int, worker: Worker, server: ManagedEngine, c: Configuration, report: Report
) -> None:
    """Train on responses of the engine, and compare its log-probabilities and routes with ours."""
    rollouts = generate_rollouts(server, worker.shape, step)
    store = RolloutStore(node=0)
    locations = store.put("batch", rollouts)
    refs = [
        make_ref(rollout, location) for rollout, location in zip(rollouts, locations, strict=True)
    ]
    advantages = [(-1.0) ** i for i in range(len(refs))]
    plan = StepPlanner(c.train, c.parallel, dp_size=1, seed=0).plan(step, refs, advantages)
    values = worker.train(plan).metrics.values()
    dtype = worker.model.dtype
    difference = values["mismatch/logprob_abs_mean"]
    disagreement = values["mismatch/route_disagreement"]
    report.require_at_most(
        f"step {step} logprob_abs_mean", difference, _MAX_LOGPROB_DIFFERENCE[dtype]
    )
    report.require_at_most(
        f"step {step} route_disagreement", disagreement, _MAX_ROUTE_DISAGREEMENT[dtype]
    )
    report.require(f"step {step} learns", values["train/grad_norm"] > 0)


def generate_rollouts(server: ManagedEngine, shape: ModelShape, seed: int) -> list[Rollout]:
    """Generate a response with its routes to each of `PROMPTS` random prompts."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(t) for t in rng.integers(2, shape.vocab_size, 12)) for _ in range(PROMPTS)]
    generations = asyncio.run(_generate(server, shape, prompts, seed))
    rollouts = []
    for index, (ids, generation) in enumerate(zip(prompts, generations, strict=True)):
        prompt = Prompt(id=f"p{index}", token_ids=ids, answer="", task="t")
        builder = RolloutBuilder(f"{seed}-{index}", prompt, 0, shape.route_shape)
        builder.sample(generation)
        rollouts.append(builder.rollout(FinishReason.STOP, trainable=True))
    return rollouts


async def _generate(
    server: ManagedEngine, shape: ModelShape, prompts: Sequence[tuple[int, ...]], seed: int
) -> list[Generation]:
    sampling = Sampling(max_new_tokens=TOKENS, temperature=1.0)
    async with GenerateClient(
        server.url,
        api_key=server.keys.api_key,
        deadline_seconds=_STEP_SECONDS / 3,
        route_shape=(shape.num_layers, shape.topk),
    ) as client:
        requests = [
            client.generate(ids, sampling, rid=f"{seed}-{i}") for i, ids in enumerate(prompts)
        ]
        return await asyncio.gather(*requests)
