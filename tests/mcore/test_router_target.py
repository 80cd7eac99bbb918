"""What one router is told under replay, without a model around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.mcore.router_target import ReplayError, RouterTarget

SCORES = torch.tensor([[9.0, 1.0, 5.0, 7.0], [2.0, 8.0, 4.0, 6.0], [3.0, 2.0, 1.0, 0.0]])
LIVE = [[0, 3], [1, 3], [0, 1]]


class Best:
    """The router's own top-k; notes what it was given."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any, Any, bool]] = []

    def __call__(self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any) -> Any:
        self.asked.append((topk, num_groups, group_topk, scores.requires_grad))
        return scores.topk(topk, dim=1)


def ask(
    target: RouterTarget, best: Best | None = None, topk: int = 2
) -> tuple[torch.Tensor, list[list[int]]]:
    scores = SCORES.clone().requires_grad_()
    values, experts = target.get_replay_topk(scores, topk, 4, 3, best or Best())
    return values, experts.tolist()


def active(
    *, measure: bool = False, forward_only: bool = False, recomputations: int = 1
) -> RouterTarget:
    target = RouterTarget(layer=4, recomputations=recomputations)
    target.activate("replay", measure=measure, forward_only=forward_only)
    return target


def routes(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


FORCED = routes([1, 2], [3, 1], [3, 2])


def test_outside_of_replay_the_router_chooses_by_itself() -> None:
    target, best = RouterTarget(), Best()
    assert target.disagreement.tolist() == [0, 0]
    assert ask(target, best)[1] == LIVE
    assert best.asked == [(2, 4, 3, True)]
    target.activate("replay", measure=False, forward_only=False)
    target.begin_forward(0, FORCED, None)
    ask(target)
    target.end_forward()
    target.deactivate()
    assert target.faults == []
    assert ask(target)[1] == LIVE


def test_within_it_uses_the_forced_experts_with_gradients_to_their_scores() -> None:
    target, best = active(), Best()
    target.begin_forward(0, FORCED, None)
    values, experts = ask(target, best)
    assert experts == FORCED.tolist() and values.tolist() == [[1, 5], [6, 8], [0, 1]]
    assert values.requires_grad
    assert best.asked == [], "nobody asks for the live choice unless it is measured"


def test_the_experts_are_indices_whatever_they_came_as() -> None:
    target = active()
    target.begin_forward(0, FORCED, None)
    assert target.get_replay_topk(SCORES, 2, None, None, Best())[1].dtype == torch.int64


def test_only_the_forward_of_a_measured_pass_is_counted_and_padding_is_not() -> None:
    target, best = active(measure=True), Best()
    target.begin_forward(0, routes([3, 0], [0, 1], [1, 2]), torch.tensor([True, True, False]))
    with torch.no_grad():
        ask(target, best)
    assert target.disagreement.tolist() == [1, 2], (
        "order is no difference, the third row is padding"
    )
    assert best.asked == [(2, 4, 3, False)], "no gradient to the live choice"
    target.end_forward()
    ask(target)
    assert target.disagreement.tolist() == [1, 2], "a recomputed router is not counted again"
    target.begin_forward(0, FORCED, None)
    ask(target)
    assert target.disagreement.tolist() == [3, 5]
    target.activate("replay", measure=False, forward_only=True)
    assert target.disagreement.tolist() == [0, 0] and target.disagreement.dtype == torch.int64
    ask(target)
    assert target.disagreement.tolist() == [0, 0]


def test_load_counts_the_rows_of_each_used_expert_and_no_padding() -> None:
    target = active(measure=True)
    target.begin_forward(0, routes([3, 0], [0, 1], [1, 2]), torch.tensor([True, True, False]))
    ask(target)
    assert target.load.tolist() == [2, 1, 0, 1]


def test_a_live_pass_uses_its_own_choice_and_counts_the_given_one_beside_it() -> None:
    target = RouterTarget()
    target.activate("live", measure=True, forward_only=True)
    target.begin_forward(0, routes([3, 0], [0, 1], [1, 2]), None)
    assert ask(target)[1] == LIVE
    target.end_forward()
    assert target.disagreement.tolist() == [2, 3] and target.load.tolist() == [2, 2, 0, 2]
    target.begin_forward(1, None, None)
    assert ask(target)[1] == LIVE
    target.end_forward()
    assert target.disagreement.tolist() == [2, 3], "nothing to compare with"
    target.deactivate()
    assert target.faults == [] and target.recordings == {}


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.uint16)])
def test_a_recording_pass_keeps_the_live_choice_of_each_micro_batch(
    experts: int, dtype: torch.dtype
) -> None:
    target = RouterTarget()
    target.activate("record", measure=False, forward_only=True)
    for batch in (0, 1):
        target.begin_forward(batch, None, None)
        scores = torch.zeros(1, experts).index_fill(1, torch.tensor([experts - 1 - batch]), 1.0)
        target.get_replay_topk(scores, 1, None, None, Best())
        target.end_forward()
    target.deactivate()
    assert {batch: kept.tolist() for batch, kept in target.recordings.items()} == {
        0: [[experts - 1]],
        1: [[experts - 2]],
    }
    assert all(kept.dtype == dtype for kept in target.recordings.values())
    assert target.faults == []


def test_without_gradients_in_a_forward_only_pass_nothing_waits_for_recomputation() -> None:
    target = active(forward_only=True)
    target.begin_forward(0, FORCED, None)
    with torch.no_grad():
        ask(target)
    target.end_forward()
    target.deactivate()
    assert target.faults == []


def test_what_was_not_recomputed_is_told_with_numbers_and_forgotten() -> None:
    target = active()
    for batch in range(3):
        target.begin_forward(batch, FORCED, None)
        with torch.no_grad():
            ask(target)
        target.end_forward()
    assert [ask(target)[1] for _ in range(2)] == [FORCED.tolist()] * 2
    target.deactivate()
    assert target.faults == ["layer 4, micro-batch 2: its router was recomputed 0 times, not 1"]
    target.activate("replay", measure=False, forward_only=False)
    target.deactivate()
    assert len(target.faults) == 1


def test_a_recomputation_that_the_settings_do_not_make_is_told() -> None:
    target = active(recomputations=0)
    target.begin_forward(0, FORCED, None)
    with torch.no_grad():
        ask(target)
    target.end_forward()
    ask(target)
    target.deactivate()
    assert target.faults == ["layer 4, micro-batch 0: its router was recomputed 1 times, not 0"]


@pytest.mark.parametrize("times", [0, 2])
def test_a_router_runs_once_in_a_forward_pass(times: int) -> None:
    target = active(recomputations=0)
    target.begin_forward(7, FORCED, None)
    for _ in range(times):
        ask(target)
    target.end_forward()
    target.deactivate()
    assert target.faults == [
        f"layer 4, micro-batch 7: its router ran {times} times in one forward pass, not once"
    ]


def test_padding_of_one_micro_batch_is_not_that_of_the_next_pass() -> None:
    target = active(measure=True, recomputations=0)
    target.begin_forward(3, FORCED, torch.tensor([True, False, False]))
    target.deactivate()
    assert target.faults == ["layer 4, micro-batch 3: its forward pass began but did not end"]
    assert target._real_rows is None and target._experts is None


def test_a_router_without_routes_for_its_micro_batch_chooses_by_itself_and_says_so() -> None:
    target = active()
    assert ask(target)[1] == LIVE
    assert target.faults == ["layer 4: its router ran without routes for its micro-batch"]


@pytest.mark.parametrize("bad", [FORCED[:2], FORCED[:, :1]])
def test_routes_of_another_shape_are_not_used_and_told(bad: torch.Tensor) -> None:
    target = active()
    target.begin_forward(0, bad, None)
    assert ask(target)[1] == LIVE
    assert target.faults == [
        f"layer 4, micro-batch 0: routes of shape {tuple(bad.shape)} for 3 rows and top-2"
    ]


def test_a_megatron_that_passes_no_topk_is_an_error() -> None:
    for target in (RouterTarget(), active()):
        with pytest.raises(ReplayError, match="passed no top-k function"):
            target.get_replay_topk(SCORES, 2)
