"""Real engines and real samples for tests."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.models.qwen3_moe import ModelShape
from megatron_rl.rollouts.assembly import assemble_rollout
from megatron_rl.rollouts.messages import RouteShape
from sglang_bridge.client import GenerateClient
from sglang_bridge.keys import create_keys
from sglang_bridge.lifeline import Lifeline
from sglang_bridge.server import ManagedEngine
from sglang_bridge.settings import EngineSettings


@contextlib.contextmanager
def running_engine(model_path: Path, directory: Path) -> Iterator[ManagedEngine]:
    """A float32 engine on CPU, healthy, ended afterwards."""
    lifeline = Lifeline()
    settings = EngineSettings(
        model_path=str(model_path),
        dtype="float32",
        device="cpu",
        max_running_requests=128,
        max_total_tokens=16384,
        extra_args=("--weight-version=0",),
    )
    engine = ManagedEngine.start(settings, keys=create_keys(), log_path=directory / "engine.log", lifeline=lifeline)
    try:
        engine.wait_healthy(240)
        yield engine
    finally:
        engine.stop()
        lifeline.close()


def route_shape(model: ModelShape) -> RouteShape:
    return RouteShape(
        moe_layers=model.moe_layers, num_hidden_layers=model.num_layers, num_experts=model.num_experts, topk=model.topk
    )


def sample(
    engine: ManagedEngine, model: ModelShape, prompts: Sequence[Prompt], sampling: Sampling, label: str = "t"
) -> list[Rollout]:
    """One response to each prompt, as the collector would build it."""

    async def draw() -> list[Rollout]:
        shape = (model.num_layers, model.topk)
        async with GenerateClient(engine.url, api_key=engine.keys.api_key, route_shape=shape) as client:
            replies = await asyncio.gather(
                *(client.generate(p.token_ids, sampling, rid=f"{label}-{i}") for i, p in enumerate(prompts))
            )
        return [
            assemble_rollout(
                prompt,
                reply,
                rollout_id=f"{label}-{i}",
                sample_index=0,
                routes=route_shape(model),
                train_truncated=True,
            )
            for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        ]

    return asyncio.run(draw())
