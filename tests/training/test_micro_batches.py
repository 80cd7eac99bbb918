"""Contents of micro-batches, computed by hand for small rollouts."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.planning.rank_view import RankView
from megatron_rl.training.micro_batches import Batcher, MicroBatch

MOE_LAYERS = (1, 2)
EXPERTS = 8
TOPK = 2
SHAPE = RouteShape(moe_layers=MOE_LAYERS, num_hidden_layers=3, num_experts=EXPERTS, topk=TOPK)
WHOLE = RankView(layers=((0, 1, 2),))
Part = tuple[Role, list[int], bool, list[float] | None]


def make_rollout(*parts: Part, layers: int = 2, has_routes: bool = True) -> Rollout:
    """Make a rollout with random routes.

    parts: segments, as (role, tokens, trainable, log-probabilities).
    """
    segments = []
    position = 0
    num_inputs = sum(len(tokens) for _, tokens, _, _ in parts) - 1
    for role, tokens, trainable, logprobs in parts:
        rows = (position, min(position + len(tokens), num_inputs))
        logprob_array = None if logprobs is None else np.array(logprobs, np.float32)
        token_array = np.array(tokens, np.int32)
        segments.append(Segment(token_array, role, trainable, logprob_array, rows, 0))
        position += len(tokens)
    rng = np.random.default_rng(num_inputs)
    routes = rng.integers(0, EXPERTS, (num_inputs, layers, TOPK)).astype(np.uint8)
    return Rollout(
        "r1", "p1", 0, FinishReason.STOP, tuple(segments), routes if has_routes else None
    )


def make_answer(prompt: list[int], response: list[int], *, trainable: bool = True) -> Rollout:
    """Make a rollout of one response, with log-probabilities of -token / 10."""
    logprobs = [-token / 10 for token in response]
    return make_rollout(
        (Role.PROMPT, prompt, False, None), (Role.RESPONSE, response, trainable, logprobs)
    )


def pack(
    rollouts: Sequence[Rollout], advantages: Sequence[float], view: RankView = WHOLE
) -> MicroBatch:
    return Batcher(view, SHAPE, torch.device("cpu")).pack(rollouts, advantages)


FIVE = make_answer([1, 2, 3], [4, 5, 6])  # five inputs
THREE = make_answer([7, 8], [9, 10])  # three inputs


def test_one_rollout() -> None:
    batch = pack([FIVE], [0.5])
    assert batch.inputs.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.inputs.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.inputs.cu_seqlens.tolist() == [0, 5]
    assert batch.inputs.max_seqlen == 5
    # The last prompt token predicts the first token of the response
    assert batch.rows.tolist() == [2, 3, 4]
    assert batch.targets.tolist() == [4, 5, 6]
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.4, -0.5, -0.6])
    assert batch.advantages.tolist() == [0.5] * 3
    assert batch.cu_seqlens.tolist() == [0, 3]


def test_dtypes() -> None:
    batch = pack([FIVE], [0.5])
    assert batch.inputs.input_ids.dtype == batch.inputs.position_ids.dtype == torch.int64
    assert batch.rows.dtype == batch.targets.dtype == torch.int64
    assert batch.rollout_logprobs.dtype == batch.advantages.dtype == torch.float32
    assert batch.inputs.cu_seqlens.dtype == batch.cu_seqlens.dtype == torch.int32
    assert batch.inputs.routes is not None and batch.inputs.routes.dtype == torch.uint8


def test_sequences_follow_each_other() -> None:
    batch = pack([FIVE, THREE], [0.5, -1.0])
    assert batch.inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 7, 8, 9]]
    assert batch.inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.inputs.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.rows.tolist() == [2, 3, 4, 6, 7]
    assert batch.targets.tolist() == [4, 5, 6, 9, 10]
    assert batch.advantages.tolist() == [0.5] * 3 + [-1.0] * 2
    assert batch.cu_seqlens.tolist() == [0, 3, 5]


def test_tool_tokens_are_inputs_but_not_trained() -> None:
    turns = make_rollout(
        (Role.PROMPT, [1, 2], False, None),
        (Role.RESPONSE, [3, 4], True, [-0.3, -0.4]),
        (Role.TOOL, [5, 6, 7], False, None),
        (Role.RESPONSE, [8, 9], True, [-0.8, -0.9]),
    )
    batch = pack([turns], [1.0])
    assert batch.inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.rows.tolist() == [1, 2, 6, 7]
    assert batch.targets.tolist() == [3, 4, 8, 9]
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.8, -0.9])
    assert batch.cu_seqlens.tolist() == [0, 4]


def test_trained_tokens_that_were_not_sampled_have_nan_logprobs() -> None:
    demonstration = make_rollout(
        (Role.PROMPT, [1, 2], False, None), (Role.RESPONSE, [3, 4], True, None)
    )
    batch = pack([FIVE, demonstration], [1.0, 1.0])
    assert [math.isnan(value) for value in batch.rollout_logprobs.tolist()] == [False] * 3 + [
        True
    ] * 2
    assert batch.rollout_logprobs.dtype == torch.float32
    assert batch.versions.tolist() == [0] * 3 + [-1] * 2


def test_each_trained_token_has_the_version_that_sampled_it() -> None:
    rollout = make_rollout(
        (Role.PROMPT, [1, 2], False, None),
        (Role.RESPONSE, [3, 4], True, [-0.3, -0.4]),
        (Role.TOOL, [5], False, None),
        (Role.RESPONSE, [6], True, [-0.6]),
    )
    prompt, first, tool, last = rollout.segments
    segments = (
        prompt,
        replace(first, version=4),
        replace(tool, version=9),
        replace(last, version=6),
    )
    batch = pack([FIVE, replace(rollout, segments=segments)], [1.0, 1.0])
    assert batch.versions.tolist() == [0, 0, 0, 4, 4, 6]
    assert pack([], []).versions.tolist() == []


def test_the_first_token_is_never_a_target() -> None:
    batch = pack([make_rollout((Role.RESPONSE, [1, 2, 3], True, [-0.1, -0.2, -0.3]))], [1.0])
    assert (batch.rows.tolist(), batch.targets.tolist()) == ([0, 1], [2, 3])
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.2, -0.3])


def test_a_rollout_without_trained_tokens_is_an_empty_sequence() -> None:
    batch = pack([make_answer([1, 2], [3, 4], trainable=False), THREE], [1.0, 2.0])
    assert batch.cu_seqlens.tolist() == [0, 0, 2]
    assert batch.targets.tolist() == [9, 10]
    assert batch.advantages.tolist() == [2.0, 2.0]


VIEWS_WITH_PADDING = [  # with the padded lengths of FIVE and THREE
    (RankView(layers=((0, 1, 2),), sp_size=2), (6, 4)),
    (RankView(layers=((0, 1, 2),), cp_size=2), (8, 4)),
    (RankView(layers=((0, 1, 2),), cp_size=2, sp_size=2), (8, 8)),
    (RankView(layers=((0, 1, 2),), cp_size=4, sp_size=2), (16, 16)),
]


@pytest.mark.parametrize(("view", "lengths"), VIEWS_WITH_PADDING)
def test_every_sequence_is_padded_to_the_row_multiple(
    view: RankView, lengths: tuple[int, int]
) -> None:
    first, second = lengths
    bounds = np.cumsum([0, first, second])
    input_ids, positions = np.full((2, first + second), -1)
    for cp_rank in range(view.cp_size):
        rank_view = replace(view, cp_rank=cp_rank)
        inputs = pack([FIVE, THREE], [0.5, -1.0], rank_view).inputs
        assert np.array_equal(inputs.cu_seqlens, bounds)
        assert inputs.max_seqlen == max(lengths)
        rows = rank_view.context_rows(bounds)
        input_ids[rows] = inputs.input_ids[0].numpy()
        positions[rows] = inputs.position_ids[0].numpy()
    assert input_ids[:5].tolist() == [1, 2, 3, 4, 5]
    assert input_ids[first : first + 3].tolist() == [7, 8, 9]
    assert not input_ids[5:first].any() and not input_ids[first + 3 :].any()
    assert positions.tolist() == [*range(first), *range(second)]


@pytest.mark.parametrize(("view", "lengths"), VIEWS_WITH_PADDING)
def test_rows_of_trained_tokens_count_the_padding_before_them(
    view: RankView, lengths: tuple[int, int]
) -> None:
    first, second = lengths
    bounds = np.array([0, first, first + second], np.int32)
    reference = pack([FIVE, THREE], [0.5, -1.0])
    places_by_row = {}
    for cp_rank in range(view.cp_size):
        rank_view = replace(view, cp_rank=cp_rank)
        batch = pack([FIVE, THREE], [0.5, -1.0], rank_view)
        rows = rank_view.context_rows(bounds)[batch.rows.numpy()].tolist()
        places_by_row |= dict(zip(rows, batch.places.tolist(), strict=True))
        assert torch.equal(batch.targets, reference.targets[batch.places])
        for name in ("rollout_logprobs", "advantages", "cu_seqlens"):
            assert torch.equal(getattr(batch, name), getattr(reference, name)), name
    assert places_by_row == {2: 0, 3: 1, 4: 2, first + 1: 3, first + 2: 4}


def test_routes_are_those_of_the_rollouts() -> None:
    inputs = pack([FIVE, THREE], [0.5, -1.0]).inputs
    assert FIVE.routes is not None and THREE.routes is not None and inputs.routes is not None
    assert np.array_equal(inputs.routes.numpy(), np.concatenate([FIVE.routes, THREE.routes]))
    assert inputs.real_rows is not None and inputs.real_rows.tolist() == [True] * 8


# Rows of FIVE and THREE, padded to [0..5][6..9], [0..7][8..11] and [0..7][8..15]
ROWS_OF_VIEWS = [
    (RankView(layers=((0, 1, 2),), sp_rank=0, sp_size=2), [0, 1, 2, 3, 4]),
    (RankView(layers=((0, 1, 2),), sp_rank=1, sp_size=2), [5, 6, 7, 8, 9]),
    (RankView(layers=((0, 1, 2),), cp_rank=0, cp_size=2), [0, 1, 6, 7, 8, 11]),
    (RankView(layers=((0, 1, 2),), cp_rank=1, cp_size=2), [2, 3, 4, 5, 9, 10]),
    (
        RankView(layers=((0, 1, 2),), cp_rank=1, cp_size=2, sp_rank=1, sp_size=2),
        [10, 11, 12, 13],
    ),
]


@pytest.mark.parametrize(("view", "rows"), ROWS_OF_VIEWS)
def test_the_routers_of_a_rank_get_the_routes_of_its_rows(view: RankView, rows: list[int]) -> None:
    inputs = pack([FIVE, THREE], [0.5, -1.0], view).inputs
    assert inputs.routes is not None and inputs.real_rows is not None
    assert FIVE.routes is not None and THREE.routes is not None
    second = int(inputs.cu_seqlens[1])
    routes_by_row = dict(enumerate(FIVE.routes)) | dict(enumerate(THREE.routes, second))
    assert inputs.real_rows.tolist() == [row in routes_by_row for row in rows]
    for row, routes in zip(rows, inputs.routes.numpy(), strict=True):
        if row in routes_by_row:
            assert np.array_equal(routes, routes_by_row[row])


def test_padding_goes_round_robin_over_all_experts() -> None:
    views = [RankView(layers=((0, 1, 2),), sp_rank=rank, sp_size=16) for rank in range(16)]
    routes = [pack([FIVE], [1.0], view).inputs.routes for view in views]
    padding = torch.cat([part for part in routes if part is not None])[5:]
    assert padding.shape == (11, len(MOE_LAYERS), TOPK)
    assert (padding.sort(-1).values.diff(dim=-1) > 0).all()  # no expert twice in a row
    for layer in range(len(MOE_LAYERS)):
        counts = torch.bincount(padding[:, layer].flatten().long(), minlength=EXPERTS)
        assert len(counts) == EXPERTS and counts.max() - counts.min() <= 1


def test_a_pipeline_stage_has_the_routes_of_its_own_layers() -> None:
    stage = RankView(layers=((2,),))
    batch = pack([make_rollout(*parts_of(FIVE), layers=1)], [1.0], stage)
    assert batch.inputs.routes is not None and batch.inputs.routes.shape == (5, 1, TOPK)
    filler = pack([], [], stage).inputs.routes
    assert filler is not None and filler.shape == (2, 1, TOPK)


def parts_of(rollout: Rollout) -> list[Part]:
    return [
        (
            s.role,
            s.tokens.tolist(),
            s.trainable,
            None if s.logprobs is None else s.logprobs.tolist(),
        )
        for s in rollout.segments
    ]


def test_more_than_256_experts_need_wider_routes() -> None:
    shape = RouteShape(moe_layers=MOE_LAYERS, num_hidden_layers=3, num_experts=300, topk=TOPK)
    many = make_rollout(*parts_of(FIVE))
    assert many.routes is not None
    wide = many.routes.astype(np.uint16) + 256
    many = Rollout("r1", "p1", 0, FinishReason.STOP, many.segments, wide)
    routes = Batcher(WHOLE, shape, torch.device("cpu")).pack([many], [1.0]).inputs.routes
    assert routes is not None and np.array_equal(routes.numpy(), wide)


def test_without_replay_routes_are_not_needed() -> None:
    without_routes = make_rollout(*parts_of(FIVE), has_routes=False)
    batcher = Batcher(WHOLE, None, torch.device("cpu"))
    assert batcher.pack([without_routes, FIVE], [1.0, 1.0]).inputs.routes is None
    with pytest.raises(ValueError, match=r"rollout r1 has no routes.*train\.replay"):
        pack([without_routes], [1.0])


@pytest.mark.parametrize(
    ("view", "rows"), [(WHOLE, 2), (RankView(((0, 1, 2),), cp_rank=1, cp_size=2, sp_size=2), 8)]
)
def test_a_filler_has_tokens_for_the_model_and_none_to_train(view: RankView, rows: int) -> None:
    batch = pack([], [], view)
    assert (
        batch.inputs.input_ids.shape == batch.inputs.position_ids.shape == (1, rows // view.cp_size)
    )
    assert batch.inputs.cu_seqlens.tolist() == [0, rows]
    assert batch.inputs.max_seqlen == rows
    num_rows = rows // (view.cp_size * view.sp_size)
    assert batch.inputs.routes is not None and batch.inputs.routes.shape == (num_rows, 2, TOPK)
    assert (batch.inputs.routes.sort(-1).values.diff(dim=-1) > 0).all()
    assert (
        batch.inputs.real_rows is not None and batch.inputs.real_rows.tolist() == [False] * num_rows
    )
    for name in ("rows", "targets", "places", "rollout_logprobs", "advantages"):
        assert getattr(batch, name).shape == (0,), name
    assert batch.cu_seqlens.tolist() == [0]
    assert batch.rows.dtype == batch.targets.dtype == torch.int64


def test_a_rank_packs_its_micro_batches_of_the_plan() -> None:
    first = OptimizerStep(
        micro_batches=(((0, 2), (1,)), ((3,), ())), denominators=Denominators(sequences=4, tokens=9)
    )
    second = OptimizerStep(
        micro_batches=(((5,),), ((4,),)), denominators=Denominators(sequences=2, tokens=4)
    )
    plan = StepPlan(
        step=0,
        rollouts=(),
        advantages=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0),
        optimizer_steps=(first, second),
    )
    rollouts = {3: FIVE, 4: THREE}
    steps = Batcher(WHOLE, SHAPE, torch.device("cpu")).optimizer_steps(plan, 1, rollouts)
    assert [[batch.targets.tolist() for batch in step] for step in steps] == [
        [[4, 5, 6], []],
        [[9, 10]],
    ]
    assert [[batch.advantages.tolist() for batch in step] for step in steps] == [
        [[3.0] * 3, []],
        [[4.0] * 2],
    ]


@pytest.mark.parametrize("view", [WHOLE, RankView(layers=((0, 1, 2),), sp_size=2)])
def test_the_last_sequence_is_padded_to_the_multiple_of_fp8_products(view: RankView) -> None:
    batcher = Batcher(view, SHAPE, torch.device("cpu"), multiple=16)
    batch = batcher.pack([FIVE, THREE], [0.5, 0.25])
    rows = 16 * view.row_multiple
    assert batch.inputs.num_tokens == rows
    assert batch.inputs.cu_seqlens.tolist() == [0, 5 + 5 % view.row_multiple, rows]
    assert batch.inputs.real_rows is not None and int(batch.inputs.real_rows.sum()) == 8
    assert batch.targets.tolist() == [4, 5, 6, 9, 10]
    assert batcher.pack([], []).inputs.num_tokens == rows  # a filler too
