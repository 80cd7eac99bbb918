"""How a rollout batch is drawn, split into optimizer steps, and what is not built yet."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import DataConfig, RolloutConfig, TrainConfig
from megatron_rl.prompts.embedded import EMBEDDED


def check_batch(rollout: RolloutConfig, train: TrainConfig, data: DataConfig) -> Iterator[Refusal]:
    """Every optimizer step gets a sample, no question is drawn twice in a step, and rollouts are on-policy.

    How many questions a JSONL file or a generator gives is known when it is read: `open_prompts` and
    `PromptSource.require` hold the same rules there.
    """
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if samples < train.optimizer_steps_per_batch:
        rule = f"{samples} samples cannot be split over so many optimizer steps"
        remedy = "Lower it, or raise rollout.prompts_per_step"
        yield Refusal("train.optimizer_steps_per_batch", train.optimizer_steps_per_batch, rule, remedy)
    if data.source != "jsonl" and rollout.prompts_per_step > data.num_train:
        rule = f"data.num_train={data.num_train} questions cannot fill one step"
        yield Refusal("rollout.prompts_per_step", rollout.prompts_per_step, rule, "Lower it, or raise data.num_train")
    yield from _check_capacity(data)
    if rollout.max_staleness > 0:
        rule = "The loop is synchronous: samples of older weights are not trained on yet"
        yield Refusal("rollout.max_staleness", rollout.max_staleness, rule, "Use rollout.max_staleness=0")


def _check_capacity(data: DataConfig) -> Iterator[Refusal]:
    task = EMBEDDED.get(data.source)
    if task is None or task.capacity is None:
        return
    for key, value, most, side in (
        ("data.num_train", data.num_train, task.capacity.train, "training"),
        ("data.num_eval", data.num_eval, task.capacity.held_out, "held-out"),
    ):
        if value > most:
            rule = f"{data.source} has {most} {side} questions in all"
            yield Refusal(key, value, rule, f"Ask for at most {key}={most}, or choose data=column_addition")
