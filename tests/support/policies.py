"""The policy, the planner and the batcher of a rank, over a small checkpoint."""

from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megatron_rl.config.algorithms import AlgoSettings
from megatron_rl.config.schema import (
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RolloutSettings,
    TrainSettings,
)
from megatron_rl.losses import Regularization, open_loss
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import wrap_data_parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights import load_hf_weights
from megatron_rl.mcore.weights.reference import ReferenceWeights
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.micro_batches import Batcher
from megatron_rl.training.policy import Policy

ASSETS = Path(__file__).resolve().parents[2] / "megatron_rl/models/assets"
COLUMN_ADDITION = ASSETS / "qwen3_moe_tiny_column_addition"
TWO_DIGIT_ADDITION = ASSETS / "qwen3_moe_tiny_two_digit_addition"

ADAM = OptimizerSettings(lr=1e-3, warmup_steps=1, decay="constant")


def train_settings(**changes: Any) -> TrainSettings:
    """Settings of one optimizer step, with changes."""
    defaults = {"total_steps": 1, "optimizer_steps_per_batch": 1}
    return TrainSettings(**(defaults | changes))


def make_policy(
    checkpoint: Path,
    parallel: ParallelSettings,
    algo: AlgoSettings,
    *,
    recompute: str = "none",
    source: Literal["rollout", "trainer"] = "rollout",
    dtype: str = "float32",
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[ModelShape, Policy]:
    """Load a checkpoint into Megatron's model with replay, for data parallelism. Collective.

    A KL penalty needs `algo.kl.reference`.

    tp_group, cp_group: groups that share the vocabulary and the sequences, from the rank's layout.
    """
    shape = read_shape(checkpoint)
    options: dict[str, Any] = {"recompute": recompute, "dtype": dtype}
    settings = ModelSettings(path=str(checkpoint), **options)
    chunks = build_models(shape, settings, parallel)
    load_hf_weights(chunks, shape, checkpoint)
    models = wrap_data_parallel(chunks)
    rollout = RolloutSettings(max_new_tokens=32, temperature=temperature)
    regularization = Regularization(algo)
    logprobs = ResponseLogprobs(
        rollout,
        64,
        vocab_size=shape.vocab_size,
        tp_group=tp_group,
        cp_group=cp_group,
        entropy_grad=regularization.entropy_grad,
    )
    reference = None
    if algo.kl.coef:
        path = Path(algo.kl.reference or checkpoint)
        reference = ReferenceWeights.read(models, shape, path, key="algo.kl.reference")
    return shape, Policy(
        models=models,
        logprobs=logprobs,
        loss=open_loss(algo, shape),
        replay=RouteReplay(models, source) if shape.moe_layers else None,
        regularization=regularization,
        reference=reference,
    )


def make_view(shape: ModelShape, parallel: ParallelSettings, layout: RankLayout) -> RankView:
    """The part of the model on this rank."""
    return RankView.for_rank(shape.num_layers, parallel, **layout.ranks)


def make_batcher(
    shape: ModelShape,
    parallel: ParallelSettings,
    layout: RankLayout,
    kind: type[Batcher] = Batcher,
    *,
    replay: bool = True,
) -> Batcher:
    """Make the batcher of a rank. replay: True to replay the routes of rollouts."""
    routes = shape.route_shape if shape.moe_layers and replay else None
    return kind(make_view(shape, parallel, layout), routes, layout.device)


def make_planner(
    parallel: ParallelSettings, layout: RankLayout, *, seed: int = 0, **train: Any
) -> StepPlanner:
    """Make the planner of a layout. train: changes of `train_settings`."""
    return StepPlanner(train_settings(**train), parallel, dp_size=layout.dp_size, seed=seed)
