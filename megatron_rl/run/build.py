"""Turns the configuration into the parts of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_rl.config.schema import AlgoConfig, TrainRlConfig
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.losses import PolicyLoss, build_policy_loss
from megatron_rl.mcore.model import ParallelSizes, build_models
from megatron_rl.mcore.optimizer import AdamSettings, DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights import load_hf_weights
from megatron_rl.models.qwen3_moe import ModelShape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.planning.rank_view import RankView
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.prompts.source import PromptSource
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.rewards import build_scorer
from megatron_rl.rollouts.hub import Hub
from megatron_rl.rollouts.messages import Configure, EngineEndpoint, NodeEngines, RouteShape
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.run.loop import LoopSettings
from megatron_rl.sync.weight_sync import WeightSync, build_weight_sync
from megatron_rl.training.batch import Batcher
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.policy import Policy
from megatron_rl.training.worker import Worker, gather_receivers
from sglang_bridge.handle import EngineHandle
from sglang_bridge.keys import RunKeys
from sglang_bridge.settings import EngineSettings

_SHARED_ALGO_KEYS = {field.name for field in dataclasses.fields(AlgoConfig)}


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def parallel_sizes(config: TrainRlConfig) -> ParallelSizes:
    parallel = config.parallel
    return ParallelSizes(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp or 1,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        sequence_parallel=parallel.sequence_parallel,
    )


def policy_loss(algo: AlgoConfig, model: ModelShape) -> PolicyLoss:
    """The loss of `algo.name` with that algorithm's own settings."""
    own = {f.name: getattr(algo, f.name) for f in dataclasses.fields(algo) if f.name not in _SHARED_ALGO_KEYS}
    if algo.name == "espo":
        own["vocab_size"] = model.vocab_size  # entropies are relative to log |V|
    return build_policy_loss(algo.name, **own)


def route_shape(config: TrainRlConfig, model: ModelShape) -> RouteShape | None:
    if not config.train.replay_routes:
        return None
    return RouteShape(
        moe_layers=model.moe_layers,
        num_hidden_layers=model.num_layers,
        num_experts=model.num_experts,
        topk=model.topk,
    )


def build_worker(config: TrainRlConfig, model: ModelShape, layout: RankLayout, rollouts: Path) -> Worker:
    """This rank's model, optimizer and stages (a collective)."""
    sizes = parallel_sizes(config)
    chunks = build_models(model, sizes, dtype=torch_dtype(config.model.dtype), recompute=config.model.recompute)
    load_hf_weights(chunks, model, config.model.path)
    models = wrap_data_parallel(chunks)
    view = _rank_view(sizes, model, layout)
    routes = route_shape(config, model)
    return Worker(
        layout=layout,
        consumers=gather_receivers(layout, view.moe_rows(model.moe_layers)),
        model=model,
        policy=Policy(
            models=models,
            logprobs=ResponseLogprobs(
                temperature=config.rollout.temperature,
                vocab_size=model.vocab_size,
                chunk_tokens=config.train.logit_chunk_tokens,
                tp_group=parallel_state.get_tensor_model_parallel_group() if sizes.tp > 1 else None,
            ),
            loss=policy_loss(config.algo, model),
            replay=RouteReplay(models) if routes is not None else None,
        ),
        optimizer=DistributedAdam(models, adam_settings(config)),
        batcher=Batcher(view, routes, layout.device),
        start_checkpoint=Path(config.model.path),
        rollouts_directory=rollouts,
        save_rollouts_every=config.logger.save_rollouts_every,
    )


def adam_settings(config: TrainRlConfig) -> AdamSettings:
    optimizer = config.optimizer
    return AdamSettings(
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=config.train.total_steps * config.train.optimizer_steps_per_batch,
        decay=optimizer.decay,
        min_lr_ratio=optimizer.min_lr_ratio,
    )


def engine_settings(config: TrainRlConfig, *, first_gpu: int, host: str) -> list[EngineSettings]:
    """One setting per managed engine of a node; with GPUs each gets `tp` devices of its own from `first_gpu` on."""
    engine = config.engine
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available())
    return [
        EngineSettings(
            model_path=str(config.model.path),
            dtype=engine.dtype,
            device="cuda" if on_gpu else "cpu",
            max_running_requests=engine.max_running_requests,
            max_total_tokens=engine.max_total_tokens,
            tp=engine.tp,
            ep=engine.ep,
            threads=engine.threads,
            host=host,
            quantization=engine.quantization,
            return_routes=config.train.replay_routes,
            gpus=tuple(range(first_gpu + index * engine.tp, first_gpu + (index + 1) * engine.tp)) if on_gpu else (),
            extra_args=tuple(engine.extra_args),
        )
        for index in range(engine.count)
    ]


def collector_configuration(config: TrainRlConfig, model: ModelShape, engines: tuple[EngineEndpoint, ...]) -> Configure:
    return Configure(
        engines=engines,
        tokenizer_path=str(config.model.path),
        routes=route_shape(config, model),
        reward_name=config.reward.name,
        reward_answer=config.reward.answer,
        reward_timeout_s=config.reward.timeout_s,
        request_timeout_s=config.engine.request_timeout_s,
        retries=config.engine.retries,
        max_in_flight=2 * config.engine.max_running_requests,
        train_truncated=config.rollout.train_truncated,
    )


def build_prompts(config: TrainRlConfig) -> PromptSource:
    data = config.data
    prompts = open_prompts(
        data.source,
        Tokenizer.from_directory(config.model.path),
        num_train=data.num_train,
        num_eval=data.num_eval,
        seed=data.seed,
        shuffle=data.shuffle,
        on_bad_row=data.on_bad_row,
        max_prompt_tokens=data.max_prompt_tokens,
        train_path=data.train_path,
        eval_path=data.eval_path,
        task=data.task,
        task_config=data.task_config,
        check_answer=build_scorer(config.reward.name, answer=config.reward.answer).check_answer,
    )
    prompts.require(config.rollout.prompts_per_step)
    return prompts


def build_producer(config: TrainRlConfig, model: ModelShape, engines: Sequence[NodeEngines], hub: Hub) -> RolloutQueue:
    """The producer over connected collectors, each told its node's engines."""
    producer = RolloutQueue(hub, max_staleness=config.rollout.max_staleness)
    producer.configure({e.node: collector_configuration(config, model, e.endpoints) for e in engines})
    return producer


def build_sync(
    config: TrainRlConfig,
    model: ModelShape,
    engines: Sequence[NodeEngines],
    keys: RunKeys,
    directory: RunDirectory,
    device: torch.device,
) -> WeightSync:
    """Weight sync from rank 0 to every engine of the run."""
    engine = config.engine
    return build_weight_sync(
        [
            EngineHandle(
                urls=(endpoint.url,), tp=engine.tp, ep=engine.ep, node=node.node, quantization=engine.quantization
            )
            for node in engines
            for endpoint in node.endpoints
        ],
        keys,
        transport=config.sync.transport,
        bucket_mb=config.sync.bucket_mb,
        timeout_s=config.sync.timeout_s,
        directory=directory.path / "sync",
        model_path=Path(config.model.path),
        device=device,
        dtype=torch_dtype(engine.dtype),
        num_experts=model.num_experts,
        audit_every=config.sync.audit_every,
    )


def loop_settings(config: TrainRlConfig, model: ModelShape) -> LoopSettings:
    rollout, sizes = config.rollout, parallel_sizes(config)
    sampling = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        stop_token_ids=model.eos_token_ids,
    )
    temperature = rollout.temperature if config.eval.temperature is None else config.eval.temperature
    return LoopSettings(
        total_steps=config.train.total_steps,
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        sampling=sampling,
        eval_sampling=Sampling(
            max_new_tokens=rollout.max_new_tokens, temperature=temperature, stop_token_ids=model.eos_token_ids
        ),
        eval_every=config.eval.every,
        eval_samples_per_prompt=config.eval.samples_per_prompt,
        optimizer_steps_per_batch=config.train.optimizer_steps_per_batch,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        micro_batch_multiple=sizes.pp if sizes.vpp > 1 else 1,
        normalize_std=config.algo.normalize_std,
        zero_variance=config.algo.zero_variance,
        permute_rewards=config.algo.permute_rewards,
        max_nonfinite_steps=config.train.max_nonfinite_steps,
        seed=config.seed,
    )


def _rank_view(sizes: ParallelSizes, model: ModelShape, layout: RankLayout) -> RankView:
    return RankView.of(
        num_layers=model.num_layers,
        pp_rank=layout.pp_rank,
        pp_size=sizes.pp,
        vpp_size=sizes.vpp,
        cp_rank=layout.cp_rank,
        cp_size=sizes.cp,
        tp_rank=layout.tp_rank,
        tp_size=sizes.tp,
        sequence_parallel=sizes.sequence_parallel,
    )
