"""Passes of micro-batches through Megatron's schedule on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.mcore.replayed_models import build
from tests.support.packed_sequences import pack, targets_of

SPLITS = {
    "one": [(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)],
    "two": [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)],
    "five": [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)],
    "uneven and shuffled": [(9, 0, 5), (3,), (7, 1, 2, 8, 6, 4)],
}


def gradients(
    models: list[Any], replay: Any, split: list[tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    from megatron_rl.mcore.schedule import run_schedule

    total = len(targets_of(range(10)))

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, int]:
        value = torch.nn.functional.cross_entropy(logits, targets_of(split[index]), reduction="sum")
        return value / total, index

    models[0].zero_grad_buffer()
    batches = [pack(sequences, range(3)) for sequences in split]
    results = run_schedule(models, batches, loss, forward_only=False, replay=replay)
    assert results == list(range(len(split)))
    return {name: p.main_grad.clone() for name, p in models[0].named_parameters()}


def norm(norms: Iterable[torch.Tensor]) -> float:
    return float(torch.stack(list(norms)).norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SPLITS if n != "one"])
def test_gradient_does_not_depend_on_the_split_into_micro_batches(
    megatron: Any, checkpoint: Path, name: str
) -> None:
    models, replay = build(checkpoint)
    whole = gradients(models, replay, SPLITS["one"])
    parts = gradients(models, replay, SPLITS[name])
    difference = {name: (parts[name] - gradient).norm() for name, gradient in whole.items()}
    # A parameter of 16 numbers can lose a digit to rounding that the whole gradient does not lose.
    for parameter, gradient in whole.items():
        assert difference[parameter] < 1e-5 * gradient.norm().clamp(min=1e-12), parameter
    assert norm(difference.values()) < 1e-6 * norm(gradient.norm() for gradient in whole.values())


def test_forward_only_pass_leaves_no_gradient_and_no_graph(megatron: Any, checkpoint: Path) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    models[0].zero_grad_buffer()
    (logits,) = run_schedule(
        models,
        [pack((0, 1), range(3))],
        lambda logits, index: (None, logits),
        forward_only=True,
        replay=replay,
    )
    assert not logits.requires_grad
    assert all(not p.main_grad.any() for p in models[0].parameters())


@pytest.mark.parametrize("with_ddp", [True, False])
def test_logits_of_a_bfloat16_model_stay_in_bfloat16(
    megatron: Any, checkpoint: Path, with_ddp: bool
) -> None:
    """A float32 copy of the logits would be the largest tensor of a step."""
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint, dtype="bfloat16")
    models = models if with_ddp else [model.module for model in models]
    batches = [pack((0, 1), range(3))]
    (dtype,) = run_schedule(
        models, batches, lambda x, _: (None, x.dtype), forward_only=True, replay=replay
    )
    assert dtype == torch.bfloat16


def test_routes_are_measured_on_request_and_without_padding(
    megatron: Any, checkpoint: Path
) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    batch = pack((0, 1), range(3))
    batch = replace(batch, real_rows=torch.arange(batch.num_tokens) < 5)

    def measured_rows(**options: bool) -> int:
        run_schedule(
            models, [batch], lambda *_: (None, None), forward_only=True, replay=replay, **options
        )
        return int(replay.disagreement()[1])

    assert measured_rows(measure_routes=True) == 5 * 3
    assert measured_rows() == 0


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of Megatron's schedule, which does nothing here, among three replicas."""
    from megatron_rl.mcore import schedule

    arguments: dict[str, Any] = {}

    def run(**options: Any) -> list[Any]:
        arguments.update(options)
        return []

    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: run)
    monkeypatch.setattr(schedule.parallel_state, "get_data_parallel_world_size", lambda: 3)
    return arguments


class Logits(torch.nn.Module):
    """A model whose logits are all 1."""

    def forward(self, **_: Any) -> torch.Tensor:
        return torch.ones(1, 5)


def test_loss_cancels_the_means_of_megatron_over_micro_batches_and_replicas(
    arguments: dict[str, Any],
) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, int]:
        return logits.sum(), index

    batches = [pack((0, 1)), pack((2,))]
    model = Logits()
    run_schedule([model], batches, loss, forward_only=False)
    indices = arguments["data_iterator"]
    for expected_index in (0, 1):
        logits, scaled_loss = arguments["forward_step_func"](indices, model)
        value, index = scaled_loss(logits)
        assert (float(value), index) == (5 * 2 * 3, expected_index)


def test_each_model_chunk_reads_every_micro_batch_with_its_own_routes(
    arguments: dict[str, Any],
) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    class Replay:
        """Notes the chunk and the micro-batch of each forward pass."""

        calls: ClassVar[list[tuple[int, int]]] = []

        def active(self, *_: Any, **__: Any) -> Any:
            return contextlib.nullcontext()

        def forward(self, chunk: int, batch: int, *_: Any) -> Any:
            self.calls.append((chunk, batch))
            return contextlib.nullcontext()

    models = [Logits(), Logits()]
    batches = [pack((0, 1)), pack((2,))]
    replay: Any = Replay()
    run_schedule(models, batches, lambda *_: (None, None), forward_only=True, replay=replay)
    for indices, model in zip(arguments["data_iterator"], models, strict=True):
        for _ in batches:
            arguments["forward_step_func"](indices, model)
    assert Replay.calls == [(0, 0), (0, 1), (1, 0), (1, 1)]
