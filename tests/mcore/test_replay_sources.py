"""Routes that do not fit are told, and routes that the trainer records itself are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.testbed.packed_sequences import pack
from tests.mcore.replayed_models import MICRO_BATCHES, build, routers, train_pass


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(
            lambda r: r[:-1],
            "layer 0, micro-batch 1: routes of shape (10, 2) for 11 rows",
            id="a row",
        ),
        pytest.param(
            lambda r: r[:, :2],
            "micro-batch 1: routes of shape (11, 2, 2), not [rows, 3 layers",
            id="a layer",
        ),
        pytest.param(
            lambda r: r[..., :1],
            "layer 3, micro-batch 1: routes of shape (11, 1) for 11",
            id="an expert",
        ),
        pytest.param(
            lambda r: None, "layer 2, micro-batch 1: there are no routes for it", id="everything"
        ),
    ],
)
def test_routes_that_do_not_fit_are_told_with_layer_and_micro_batch(
    megatron: Any, checkpoint: Path, spoil: Any, said: str
) -> None:
    """The rank goes on to where all agree: an exception inside a pass would leave the others
    waiting.
    """
    from dataclasses import replace

    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    good, batch = (pack(m, range(3)) for m in MICRO_BATCHES)
    rows = len(batch.routes)
    bad = [good, replace(batch, routes=spoil(batch.routes))]
    run_schedule(models, bad, lambda logits, index: (None, None), forward_only=True, replay=replay)
    assert replay.has_faults
    assert said.replace("11", str(rows)).replace("10", str(rows - 1)) in replay.take_faults()
    assert not replay.has_faults and replay.take_faults() == ""


def test_routes_of_other_layers_than_the_routers_are_refused_before_anything_runs(
    megatron: Any, checkpoint: Path
) -> None:
    from megatron_rl.mcore.router_target import ReplayError

    _, replay = build(checkpoint)
    replay.require_layers((0, 2, 3))
    with pytest.raises(
        ReplayError, match=r"layers \[0, 2, 3\], its routes of \[0, 1, 2\].*train\.replay=off"
    ):
        replay.require_layers((0, 1, 2))


def test_a_skipped_recomputation_is_a_fault(megatron: Any, checkpoint: Path) -> None:
    """A loss that does not reach the logits skips the backward pass, and with it every planned
    recomputation.
    """
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint, "full")
    batches = [pack(m, range(3)) for m in MICRO_BATCHES]
    run_schedule(
        models,
        batches,
        lambda logits, index: (torch.zeros(()), None),
        forward_only=False,
        replay=replay,
    )
    told = replay.take_faults()
    assert "layer 0, micro-batch 1: its router was recomputed 0 times, not 1" in told
    assert "layer 2, micro-batch 0" in told and told.count(";") == 2 * 3 - 1


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_in_a_whole_pass_every_route_is_used_as_often_as_it_must_be(
    megatron: Any, checkpoint: Path, recompute: Any
) -> None:
    models, replay = build(checkpoint, recompute)
    train_pass(models, replay)
    assert replay.take_faults() == ""


def test_a_router_that_runs_twice_or_never_in_a_forward_pass_is_a_fault(
    megatron: Any, checkpoint: Path
) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    twice, never = routers(models)[0], routers(models)[2]
    again = twice.forward
    twice.forward = lambda *inputs, **kwargs: (again(*inputs, **kwargs), again(*inputs, **kwargs))[
        1
    ]
    kept = never.router_replay
    never.router_replay = None  # as a path through Megatron that asks nobody
    batches = [pack(m, range(3)) for m in MICRO_BATCHES]
    run_schedule(
        models, batches, lambda logits, index: (None, None), forward_only=True, replay=replay
    )
    told = replay.take_faults()
    assert "layer 0, micro-batch 1: its router ran 2 times in one forward pass, not once" in told
    assert "layer 3, micro-batch 0: its router ran 0 times in one forward pass, not once" in told
    assert kept.faults == []


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recorded_routes_are_replayed_after_the_weights_have_moved(
    megatron: Any, checkpoint: Path, recompute: Any
) -> None:
    """R2: what the routers chose in the old-policy pass is what the update uses, in every forward
    and recomputation.
    """
    from dataclasses import replace

    from megatron_rl.mcore.schedule import run_schedule
    from tests.support.routers import routers_checked

    models, replay = build(checkpoint, recompute)
    batches = [pack(m) for m in MICRO_BATCHES]

    def record() -> list[Any]:
        run_schedule(
            models,
            batches,
            lambda *_: (None, None),
            forward_only=True,
            replay=replay,
            routing="record",
        )
        return replay.take_recorded_routes(len(batches))

    recorded = [routes for routes in record() if routes is not None]
    assert [r.shape for r in recorded] == [(b.num_tokens, 3, 2) for b in batches]
    assert all(r.dtype == torch.uint8 for r in recorded)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in models[0].parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    moved = [
        (a.sort().values != b.sort().values).any(-1).float().mean()
        for a, b in zip(recorded, record(), strict=True)
    ]
    assert min(moved) > 0.2, "the routers would choose the same again"
    batches = [replace(b, routes=r) for b, r in zip(batches, recorded, strict=True)]
    with routers_checked(models, batches, recomputed=recompute == "full"):
        run_schedule(
            models,
            batches,
            lambda logits, _: (logits.square().mean(), None),
            forward_only=False,
            replay=replay,
        )
    assert replay.take_faults() == ""


def test_a_router_that_recorded_nothing_is_a_fault_and_leaves_nothing_to_replay(
    megatron: Any, checkpoint: Path
) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    (batch,) = [pack(MICRO_BATCHES[0])]
    routers(models)[1].router_replay = None
    run_schedule(
        models, [batch], lambda *_: (None, None), forward_only=True, replay=replay, routing="record"
    )
    assert replay.take_recorded_routes(1) == [None]
    assert "layer 2, micro-batch 0: its router recorded nothing" in replay.take_faults()
    assert replay.take_recorded_routes(1) == [None], "what was recorded is handed out once"


def test_a_stage_without_experts_records_nothing_and_that_is_no_fault() -> None:
    from megatron_rl.mcore.replay import RouteReplay

    replay = RouteReplay([torch.nn.Linear(2, 2)], "trainer")
    assert replay.take_recorded_routes(2) == [None, None] and replay.take_faults() == ""
