"""Script: plants one fault after another into the real trainer on the pretended device.

    python -m tests.lab.pretended_device tests.lab.pretended_device.planted_faults OUT

It writes OUT/faults.json: for each fault the error's message, or what it changed; and the host
waits of steps with two and with three micro-batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch

from megatron_rl.config.algorithms import EspoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.mcore import parallel, router_target, schedule
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.training import logprobs as logprobs_module
from megatron_rl.training import micro_batches
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.old_policy import BatchObjective, compute_old_policy
from megatron_rl.training.update import update_policy
from tests.lab.pretended_device.host_waits import Wait
from tests.lab.pretended_device.pretend import current
from tests.support.batches import make_batch
from tests.support.policies import ADAM, COLUMN_ADDITION, make_batcher, make_policy

GRID = ParallelSettings(timeout_s=60)


class Step:
    """An optimizer step of the tiny model in bfloat16, from the old-policy pass to Adam."""

    def __init__(self) -> None:
        self.layout = parallel.initialize(GRID, seed=0)
        self.shape, self.policy = make_policy(
            COLUMN_ADDITION, GRID, EspoSettings(), dtype="bfloat16", recompute="full"
        )
        self.optimizer = DistributedAdam(self.policy.models, ADAM, total_steps=100)
        self.batcher = make_batcher(self.shape, GRID, self.layout)
        _, self.rollouts, self.advantages = make_batch(self.shape, 6)

    def run(self, micro_batches: int = 2) -> float:
        """Run one step over micro-batches of two rollouts. Returns the gradient norm."""
        batches = [
            self.batcher.pack(self.rollouts[i : i + 2], self.advantages[i : i + 2])
            for i in range(0, 2 * micro_batches, 2)
        ]
        metrics = MetricSums()
        objectives = compute_old_policy(self.policy, batches, metrics)
        result = update_policy(
            self.policy,
            self.optimizer,
            batches,
            objectives,
            Denominators(sequences=6.0, tokens=100.0),
            dp_size=1,
            first_step=True,
            metrics=metrics,
        )
        metrics.values()
        return result.grad_norm


@contextlib.contextmanager
def replace(place: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, original)


def error_of(step: Step) -> str:
    """The message of the error with which the step ends; empty if there is none."""
    try:
        step.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def waits_of(step: Step, micro_batches: int = 2) -> Counter[Wait]:
    with current().waits.counting() as waits:
        step.run(micro_batches)
    return waits


def as_json(waits: Counter[Wait]) -> dict[str, int]:
    return {str(wait): count for wait, count in sorted(waits.items())}


def cpu_tensor_in_the_loss(step: Step) -> str:
    call = BatchObjective.__call__

    def weigh(self: Any, logprobs: torch.Tensor, entropies: torch.Tensor, counts: Any) -> Any:
        return call(self, logprobs * torch.ones(len(logprobs)), entropies, counts)

    with replace(BatchObjective, "__call__", weigh):
        return error_of(step)


def cpu_tensor_for_a_kernel(step: Step) -> str:
    kernel = logprobs_module.token_logprob_entropy

    def with_host_targets(logits: Any, targets: torch.Tensor, **options: Any) -> Any:
        return kernel(logits, targets.cpu(), **options)

    with replace(logprobs_module, "token_logprob_entropy", with_host_targets):
        return error_of(step)


def replay_without_device(step: Step) -> str:
    def real_mask(experts: torch.Tensor, real_rows: torch.Tensor | None) -> torch.Tensor:
        return torch.ones(len(experts), dtype=torch.bool)

    with replace(router_target, "_real_mask", real_mask):
        return error_of(step)


def index_of_another_device(step: Step) -> str:
    values = ResponseLogprobs._local_values

    def from_other_device(self: Any, logits: torch.Tensor, batch: Any) -> Any:
        moved_batch = dataclasses.replace(batch, rows=batch.rows.to("cuda:1"))
        return values(self, logits, moved_batch)

    with replace(ResponseLogprobs, "_local_values", from_other_device):
        return error_of(step)


def mask_on_the_cpu(step: Step) -> str:
    loss = schedule._ForwardStep._loss

    def mask(self: Any, logits: torch.Tensor, index: int) -> Any:
        return loss(self, logits.masked_fill(torch.zeros((*logits.shape[:2], 1)).bool(), 0), index)

    with replace(schedule._ForwardStep, "_loss", mask):
        return error_of(step)


def arange_without_device_in_megatron(step: Step) -> str:
    permute = token_dispatcher.permute

    def permute_tokens(tokens: torch.Tensor, routing_map: torch.Tensor, **options: Any) -> Any:
        return permute(tokens.index_select(0, torch.arange(len(tokens))), routing_map, **options)

    with replace(token_dispatcher, "permute", permute_tokens):
        return error_of(step)


def generator_of_another_device(step: Step) -> str:
    loss = schedule._ForwardStep._loss
    generator = torch.Generator()

    def noisy(self: Any, logits: torch.Tensor, index: int) -> Any:
        noise = torch.rand(logits.shape, generator=generator, device=logits.device)
        return loss(self, logits + noise, index)

    with replace(schedule._ForwardStep, "_loss", noisy):
        return error_of(step)


def float32_weight_in_bfloat16(step: Step) -> str:
    unpermute = token_dispatcher.unpermute

    def widen(rows: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        weight = torch.eye(rows.shape[1], device=rows.device)
        return unpermute(rows @ weight, *args, **options)

    with replace(token_dispatcher, "unpermute", widen):
        return error_of(step)


def item_in_the_schedule(step: Step) -> Counter[Wait]:
    loss = schedule._ForwardStep._loss

    def read(self: Any, logits: torch.Tensor, index: int) -> Any:
        logits.sum().item()
        return loss(self, logits, index)

    return waits_with(step, lambda: replace(schedule._ForwardStep, "_loss", read))


def cpu_copy_of_each_micro_batch(step: Step) -> Counter[Wait]:
    values = ResponseLogprobs._local_values

    def copy(self: Any, logits: torch.Tensor, batch: Any) -> Any:
        batch.targets.cpu()
        return values(self, logits, batch)

    return waits_with(step, lambda: replace(ResponseLogprobs, "_local_values", copy))


def upload_from_pageable_memory(step: Step) -> Counter[Wait]:
    def tensor(self: Any, array: Any) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self._device)

    return waits_with(step, lambda: replace(micro_batches.Batcher, "_tensor", tensor))


def waits_with(step: Step, plant: Callable[[], Any]) -> Counter[Wait]:
    """The waits of a step of two micro-batches with a fault."""
    with plant():
        return waits_of(step)


def result_read_before_the_copy_ends(step: Step) -> str:
    """A gradient norm that the host reads from pinned memory without waiting is NaN."""
    norm = torch.full((), step.run(), device="cuda")
    return str(float(norm.to("cpu", non_blocking=True)))


def pinned_memory_written_during_a_copy(step: Step) -> str:
    tensor = micro_batches.Batcher._tensor
    buffer = torch.zeros(4096).pin_memory()

    def reuse_buffer(self: Any, array: Any) -> torch.Tensor:
        if array.dtype != "float32":
            return tensor(self, array)
        part = buffer[: len(array)]
        part.copy_(torch.from_numpy(array.copy()))
        return part.to(self._device, non_blocking=True)

    with replace(micro_batches.Batcher, "_tensor", reuse_buffer):
        return error_of(step)


ERRORS = (
    cpu_tensor_in_the_loss,
    cpu_tensor_for_a_kernel,
    replay_without_device,
    index_of_another_device,
    mask_on_the_cpu,
    arange_without_device_in_megatron,
    generator_of_another_device,
    float32_weight_in_bfloat16,
    result_read_before_the_copy_ends,
    pinned_memory_written_during_a_copy,
)
ADDED_WAITS = (item_in_the_schedule, cpu_copy_of_each_micro_batch, upload_from_pageable_memory)


def main() -> None:
    step = Step()
    step.run()
    usual_waits = {count: waits_of(step, count) for count in (2, 3)}
    added_waits = {fault.__name__: as_json(fault(step) - usual_waits[2]) for fault in ADDED_WAITS}
    errors = {fault.__name__: fault(step) for fault in ERRORS}
    result = {
        "waits": {str(count): as_json(waits) for count, waits in usual_waits.items()},
        "added_waits": added_waits,
        "errors": errors,
        "calls": dict(current().cuda.calls),
        "device": str(next(step.policy.models[0].parameters()).device),
    }
    (Path(sys.argv[1]) / "faults.json").write_text(json.dumps(result, indent=1))
    parallel.shutdown()


if __name__ == "__main__":
    main()
