"""Choices of one router under replay, without a model around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.mcore.router_target import RouterTarget, Routing

SCORES = torch.tensor([[9.0, 1.0, 5.0, 7.0], [2.0, 8.0, 4.0, 6.0], [3.0, 2.0, 1.0, 0.0]])
LIVE = [[0, 3], [1, 3], [0, 1]]


class OwnChoice:
    """The router's own top-k. Records its arguments, and whether the scores have gradients."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any, Any, bool]] = []

    def __call__(self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any) -> Any:
        self.calls.append((topk, num_groups, group_topk, scores.requires_grad))
        return scores.topk(topk, dim=1)


def call_router(
    target: RouterTarget, own_choice: OwnChoice | None = None, topk: int = 2
) -> tuple[torch.Tensor, list[list[int]]]:
    scores = SCORES.clone().requires_grad_()
    values, experts = target.get_replay_topk(scores, topk, 4, 3, own_choice or OwnChoice())
    return values, experts.tolist()


def active_target(
    *, measure: bool = False, forward_only: bool = False, recomputations: int = 1
) -> RouterTarget:
    target = RouterTarget(layer=4, recomputations=recomputations)
    target.activate("replay", measure=measure, forward_only=forward_only)
    return target


def routes(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


RECORDED = routes([1, 2], [3, 1], [3, 2])


def test_inactive_target_returns_the_live_choice() -> None:
    target = RouterTarget()
    own_choice = OwnChoice()
    assert target.disagreement.tolist() == [0, 0]
    assert call_router(target, own_choice)[1] == LIVE
    assert own_choice.calls == [(2, 4, 3, True)]
    target.activate("replay", measure=False, forward_only=False)
    target.begin_forward(0, RECORDED, None)
    call_router(target)
    target.end_forward()
    target.deactivate()
    assert target.faults == []
    assert call_router(target)[1] == LIVE


def test_active_target_returns_recorded_experts_and_scores_with_gradients() -> None:
    target = active_target()
    own_choice = OwnChoice()
    target.begin_forward(0, RECORDED, None)
    values, experts = call_router(target, own_choice)
    assert experts == RECORDED.tolist() and values.tolist() == [[1, 5], [6, 8], [0, 1]]
    assert values.requires_grad
    assert own_choice.calls == [], "the live choice is computed only when it is measured"


def test_replayed_experts_are_int64_indices() -> None:
    target = active_target()
    target.begin_forward(0, RECORDED, None)
    assert target.get_replay_topk(SCORES, 2, None, None, OwnChoice())[1].dtype == torch.int64


def test_disagreement_counts_forward_passes_without_padding() -> None:
    target = active_target(measure=True)
    own_choice = OwnChoice()
    target.begin_forward(0, routes([3, 0], [0, 1], [1, 2]), torch.tensor([True, True, False]))
    with torch.no_grad():
        call_router(target, own_choice)
    assert target.disagreement.tolist() == [1, 2], (
        "order makes no difference, and the third row is padding"
    )
    assert own_choice.calls == [(2, 4, 3, False)], "the live choice gets no gradient"
    target.end_forward()
    call_router(target)
    assert target.disagreement.tolist() == [1, 2], "a recomputed router is not counted again"
    target.begin_forward(0, RECORDED, None)
    call_router(target)
    assert target.disagreement.tolist() == [3, 5]
    target.activate("replay", measure=False, forward_only=True)
    assert target.disagreement.tolist() == [0, 0] and target.disagreement.dtype == torch.int64
    call_router(target)
    assert target.disagreement.tolist() == [0, 0]


def test_load_counts_rows_of_each_expert_without_padding() -> None:
    target = active_target(measure=True)
    target.begin_forward(0, routes([3, 0], [0, 1], [1, 2]), torch.tensor([True, True, False]))
    call_router(target)
    assert target.load.tolist() == [2, 1, 0, 1]


def test_live_pass_compares_the_live_choice_with_the_recorded_experts() -> None:
    target = RouterTarget()
    target.activate("live", measure=True, forward_only=True)
    target.begin_forward(0, routes([3, 0], [0, 1], [1, 2]), None)
    assert call_router(target)[1] == LIVE
    target.end_forward()
    assert target.disagreement.tolist() == [2, 3] and target.load.tolist() == [2, 2, 0, 2]
    target.begin_forward(1, None, None)
    assert call_router(target)[1] == LIVE
    target.end_forward()
    assert target.disagreement.tolist() == [2, 3], "nothing to compare with"
    target.deactivate()
    assert target.faults == [] and target.recordings == {}


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.uint16)])
def test_recording_pass_records_the_live_choice_of_each_micro_batch(
    experts: int, dtype: torch.dtype
) -> None:
    target = RouterTarget()
    target.activate("record", measure=False, forward_only=True)
    for batch in (0, 1):
        target.begin_forward(batch, None, None)
        scores = torch.zeros(1, experts).index_fill(1, torch.tensor([experts - 1 - batch]), 1.0)
        target.get_replay_topk(scores, 1, None, None, OwnChoice())
        target.end_forward()
    target.deactivate()
    assert {batch: choice.tolist() for batch, choice in target.recordings.items()} == {
        0: [[experts - 1]],
        1: [[experts - 2]],
    }
    assert all(choice.dtype == dtype for choice in target.recordings.values())
    assert target.faults == []


def test_forward_only_pass_expects_no_recomputation() -> None:
    target = active_target(forward_only=True)
    target.begin_forward(0, RECORDED, None)
    with torch.no_grad():
        call_router(target)
    target.end_forward()
    target.deactivate()
    assert target.faults == []


def test_missing_recomputation_is_a_fault_and_is_dropped_with_the_pass() -> None:
    target = active_target()
    for batch in range(3):
        target.begin_forward(batch, RECORDED, None)
        with torch.no_grad():
            call_router(target)
        target.end_forward()
    assert [call_router(target)[1] for _ in range(2)] == [RECORDED.tolist()] * 2
    target.deactivate()
    assert target.faults == ["layer 4, micro-batch 2: its router was recomputed 0 times, not 1"]
    target.activate("replay", measure=False, forward_only=False)
    other_routes = routes([0, 1], [0, 1], [0, 1])
    target.begin_forward(0, other_routes, None)
    with torch.no_grad():
        call_router(target)
    target.end_forward()
    assert call_router(target)[1] == other_routes.tolist(), "not the routes of the pass before"
    target.deactivate()
    assert len(target.faults) == 1


def test_unexpected_recomputation_is_a_fault() -> None:
    target = active_target(recomputations=0)
    target.begin_forward(0, RECORDED, None)
    with torch.no_grad():
        call_router(target)
    target.end_forward()
    call_router(target)
    target.deactivate()
    assert target.faults == ["layer 4, micro-batch 0: its router was recomputed 1 times, not 0"]


@pytest.mark.parametrize("times", [0, 2])
def test_other_than_one_call_in_a_forward_pass_is_a_fault(times: int) -> None:
    target = active_target(recomputations=0)
    target.begin_forward(7, RECORDED, None)
    for _ in range(times):
        call_router(target)
    target.end_forward()
    target.deactivate()
    assert target.faults == [
        f"layer 4, micro-batch 7: its router ran {times} times in one forward pass, not once"
    ]


def test_deactivation_clears_padding_and_routes() -> None:
    """Neither the routes nor the padding of a pass that broke off reach the next one."""
    target = active_target(measure=True, recomputations=0)
    target.begin_forward(3, RECORDED, torch.tensor([True, False, False]))
    target.deactivate()
    assert target.faults == ["layer 4, micro-batch 3: its forward pass began but did not end"]
    assert call_router(target)[1] == LIVE
    target.activate("replay", measure=True, forward_only=True)
    target.begin_forward(4, RECORDED, None)
    call_router(target)
    target.end_forward()
    target.deactivate()
    assert len(target.faults) == 1
    assert target.disagreement.tolist()[1] == 3


def test_call_without_routes_returns_the_live_choice_and_is_a_fault() -> None:
    target = active_target()
    assert call_router(target)[1] == LIVE
    assert target.faults == ["layer 4: its router ran without routes for its micro-batch"]


@pytest.mark.parametrize("bad_routes", [RECORDED[:2], RECORDED[:, :1]])
def test_routes_of_incorrect_shape_are_a_fault(bad_routes: torch.Tensor) -> None:
    target = active_target()
    target.begin_forward(0, bad_routes, None)
    assert call_router(target)[1] == LIVE
    assert target.faults == [
        f"layer 4, micro-batch 0: routes of shape {tuple(bad_routes.shape)} for 3 rows and top-2"
    ]


def test_missing_topk_function_raises_an_error() -> None:
    for target in (RouterTarget(), active_target()):
        with pytest.raises(Failure, match="passed no top-k function"):
            target.get_replay_topk(SCORES, 2)


@pytest.mark.parametrize("routing", ["live", "record"])
def test_a_choice_is_sorted_in_a_pass_without_gradients(routing: Routing) -> None:
    """Megatron sorts with gradients alone. The count of recomputations does not see it."""
    modes = []

    def choose(scores: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        modes.append(torch.is_grad_enabled())
        return scores.topk(topk)

    target = RouterTarget(recomputations=1)
    target.activate(routing, measure=False, forward_only=False)
    target.begin_forward(0, torch.tensor([[0, 1]]), None)
    with torch.no_grad():
        target.get_replay_topk(torch.tensor([[1.0, 2.0]]), 2, default_compute_topk=choose)
    target.end_forward()
    target.get_replay_topk(torch.tensor([[1.0, 2.0]]), 2, default_compute_topk=choose)
    target.deactivate()
    assert modes == [True, True] and target.faults == []
