"""What a micro-batch holds, worked out by hand for small rollouts."""

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

MOE_LAYERS, EXPERTS, TOPK = (1, 2), 8, 2
SHAPE = RouteShape(moe_layers=MOE_LAYERS, num_hidden_layers=3, num_experts=EXPERTS, topk=TOPK)
WHOLE = RankView(layers=((0, 1, 2),))
Part = tuple[Role, list[int], bool, list[float] | None]


def rollout(*parts: Part, layers: int = 2, routed: bool = True) -> Rollout:
    """Segments of (role, tokens, trained, log-probabilities), with random routes."""
    segments, position = [], 0
    inputs = sum(len(tokens) for _, tokens, _, _ in parts) - 1
    for role, tokens, trained, logprobs in parts:
        known = None if logprobs is None else np.array(logprobs, np.float32)
        rows = (position, min(position + len(tokens), inputs))
        segments.append(Segment(np.array(tokens, np.int32), role, trained, known, rows, 0))
        position += len(tokens)
    routes = (
        np.random.default_rng(inputs).integers(0, EXPERTS, (inputs, layers, TOPK)).astype(np.uint8)
    )
    return Rollout("r1", "p1", 0, FinishReason.STOP, tuple(segments), routes if routed else None)


def answered(prompt: list[int], response: list[int], *, trained: bool = True) -> Rollout:
    logprobs = [-token / 10 for token in response]
    return rollout((Role.PROMPT, prompt, False, None), (Role.RESPONSE, response, trained, logprobs))


def pack(
    rollouts: Sequence[Rollout], advantages: Sequence[float], view: RankView = WHOLE
) -> MicroBatch:
    return Batcher(view, SHAPE, torch.device("cpu")).pack(rollouts, advantages)


FIVE, THREE = answered([1, 2, 3], [4, 5, 6]), answered([7, 8], [9, 10])  # five and three inputs


def test_one_rollout() -> None:
    batch = pack([FIVE], [0.5])
    assert batch.inputs.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.inputs.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.inputs.cu_seqlens.tolist() == [0, 5]
    assert batch.inputs.max_seqlen == 5
    assert batch.rows.tolist() == [2, 3, 4], (
        "the last prompt token predicts the first of the response"
    )
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


def test_what_a_tool_wrote_is_read_and_not_trained() -> None:
    turns = rollout(
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


def test_trained_tokens_that_nobody_sampled_have_no_rollout_logprob() -> None:
    demonstration = rollout((Role.PROMPT, [1, 2], False, None), (Role.RESPONSE, [3, 4], True, None))
    batch = pack([FIVE, demonstration], [1.0, 1.0])
    assert [math.isnan(value) for value in batch.rollout_logprobs.tolist()] == [False] * 3 + [
        True
    ] * 2
    assert batch.rollout_logprobs.dtype == torch.float32


def test_the_first_token_is_never_a_target() -> None:
    batch = pack([rollout((Role.RESPONSE, [1, 2, 3], True, [-0.1, -0.2, -0.3]))], [1.0])
    assert (batch.rows.tolist(), batch.targets.tolist()) == ([0, 1], [2, 3])
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.2, -0.3])


def test_a_rollout_without_trained_tokens_is_an_empty_sequence() -> None:
    batch = pack([answered([1, 2], [3, 4], trained=False), THREE], [1.0, 2.0])
    assert batch.cu_seqlens.tolist() == [0, 0, 2]
    assert batch.targets.tolist() == [9, 10]
    assert batch.advantages.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("view", "padded"),
    [
        (RankView(layers=((0, 1, 2),), sp_size=2), (6, 4)),
        (RankView(layers=((0, 1, 2),), cp_size=2), (8, 4)),
        (RankView(layers=((0, 1, 2),), cp_size=2, sp_size=2), (8, 8)),
        (RankView(layers=((0, 1, 2),), cp_size=4, sp_size=2), (16, 16)),
    ],
)
def test_every_sequence_is_padded_to_the_row_multiple(
    view: RankView, padded: tuple[int, int]
) -> None:
    plain = pack([FIVE, THREE], [0.5, -1.0])
    first, second = padded
    inputs, positions, trained = ([-1] * (first + second) for _ in range(3))
    for rank in range(view.cp_size):
        mine = replace(view, cp_rank=rank)
        batch = pack([FIVE, THREE], [0.5, -1.0], mine)
        assert batch.inputs.cu_seqlens.tolist() == [0, first, first + second]
        assert batch.inputs.max_seqlen == max(padded)
        held = mine.context_rows(np.array([0, first, first + second], np.int32))
        assert len(held) == (first + second) // view.cp_size == batch.inputs.num_tokens
        for at, row in enumerate(held):
            inputs[row] = int(batch.inputs.input_ids[0, at])
            positions[row] = int(batch.inputs.position_ids[0, at])
        assert torch.equal(batch.targets, plain.targets[batch.places])
        for row, place in zip(batch.rows.tolist(), batch.places.tolist(), strict=True):
            trained[held[row]] = place
        for name in ("rollout_logprobs", "advantages", "cu_seqlens"):
            assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert inputs == [1, 2, 3, 4, 5] + [0] * (first - 5) + [7, 8, 9] + [0] * (second - 3)
    assert positions == [*range(first), *range(second)]
    places = {2: 0, 3: 1, 4: 2, first + 1: 3, first + 2: 4}
    assert trained == [places.get(row, -1) for row in range(first + second)], (
        "rows count the padding before them"
    )


def test_routes_are_those_of_the_rollouts() -> None:
    inputs = pack([FIVE, THREE], [0.5, -1.0]).inputs
    assert FIVE.routes is not None and THREE.routes is not None and inputs.routes is not None
    assert np.array_equal(inputs.routes.numpy(), np.concatenate([FIVE.routes, THREE.routes]))
    assert inputs.real_rows is not None and inputs.real_rows.tolist() == [True] * 8


@pytest.mark.parametrize(
    ("view", "rows"),  # of FIVE and THREE padded to [0..5][6..9], [0..7][8..11] and [0..7][8..15]
    [
        (RankView(layers=((0, 1, 2),), sp_rank=0, sp_size=2), [0, 1, 2, 3, 4]),
        (RankView(layers=((0, 1, 2),), sp_rank=1, sp_size=2), [5, 6, 7, 8, 9]),
        (RankView(layers=((0, 1, 2),), cp_rank=0, cp_size=2), [0, 1, 6, 7, 8, 11]),
        (RankView(layers=((0, 1, 2),), cp_rank=1, cp_size=2), [2, 3, 4, 5, 9, 10]),
        (
            RankView(layers=((0, 1, 2),), cp_rank=1, cp_size=2, sp_rank=1, sp_size=2),
            [10, 11, 12, 13],
        ),
    ],
)
def test_a_rank_s_routers_get_their_rows_of_routes(view: RankView, rows: list[int]) -> None:
    inputs = pack([FIVE, THREE], [0.5, -1.0], view).inputs
    assert inputs.routes is not None and inputs.real_rows is not None
    second = int(inputs.cu_seqlens[1])
    real = {row: FIVE.routes[row] for row in range(5)} | {
        second + row: THREE.routes[row] for row in range(3)
    }
    assert inputs.real_rows.tolist() == [row in real for row in rows]
    for row, routes in zip(rows, inputs.routes.numpy(), strict=True):
        if row in real:
            assert np.array_equal(routes, real[row])


def test_padding_goes_round_robin_over_all_experts() -> None:
    views = [RankView(layers=((0, 1, 2),), sp_rank=rank, sp_size=16) for rank in range(16)]
    routes = [pack([FIVE], [1.0], view).inputs.routes for view in views]
    padding = torch.cat([part for part in routes if part is not None])[5:]
    assert padding.shape == (11, len(MOE_LAYERS), TOPK)
    assert (padding.sort(-1).values.diff(dim=-1) > 0).all(), "an expert twice in a row"
    for layer in range(len(MOE_LAYERS)):
        used = torch.bincount(padding[:, layer].flatten().long(), minlength=EXPERTS)
        assert len(used) == EXPERTS and used.max() - used.min() <= 1, "spread unevenly"


def test_a_pipeline_stage_has_the_routes_of_its_own_layers() -> None:
    stage = RankView(layers=((2,),))
    batch = pack([rollout(*parts(FIVE), layers=1)], [1.0], stage)
    assert batch.inputs.routes is not None and batch.inputs.routes.shape == (5, 1, TOPK)
    filler = pack([], [], stage).inputs.routes
    assert filler is not None and filler.shape == (2, 1, TOPK)


def parts(of: Rollout) -> list[Part]:
    return [
        (
            s.role,
            s.tokens.tolist(),
            s.trainable,
            None if s.logprobs is None else s.logprobs.tolist(),
        )
        for s in of.segments
    ]


def test_more_than_256_experts_need_wider_routes() -> None:
    shape = RouteShape(moe_layers=MOE_LAYERS, num_hidden_layers=3, num_experts=300, topk=TOPK)
    many = rollout(*parts(FIVE))
    assert many.routes is not None
    wide = many.routes.astype(np.uint16) + 256
    many = Rollout("r1", "p1", 0, FinishReason.STOP, many.segments, wide)
    routes = Batcher(WHOLE, shape, torch.device("cpu")).pack([many], [1.0]).inputs.routes
    assert routes is not None and np.array_equal(routes.numpy(), wide)


def test_without_replay_routes_are_neither_needed_nor_packed() -> None:
    bare = rollout(*parts(FIVE), routed=False)
    batcher = Batcher(WHOLE, None, torch.device("cpu"))
    assert batcher.pack([bare, FIVE], [1.0, 1.0]).inputs.routes is None
    with pytest.raises(
        ValueError, match=r"rollout r1 has no routes to replay\. Set train\.replay=trainer or off"
    ):
        pack([bare], [1.0])


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
    held = rows // (view.cp_size * view.sp_size)
    assert batch.inputs.routes is not None and batch.inputs.routes.shape == (held, 2, TOPK)
    assert (batch.inputs.routes.sort(-1).values.diff(dim=-1) > 0).all()
    assert batch.inputs.real_rows is not None and batch.inputs.real_rows.tolist() == [False] * held
    for name in ("rows", "targets", "places", "rollout_logprobs", "advantages"):
        assert getattr(batch, name).shape == (0,), name
    assert batch.cu_seqlens.tolist() == [0]
    assert batch.rows.dtype == batch.targets.dtype == torch.int64


def test_a_rank_packs_what_the_plan_gives_it() -> None:
    one = OptimizerStep(
        micro_batches=(((0, 2), (1,)), ((3,), ())), denominators=Denominators(sequences=4, tokens=9)
    )
    two = OptimizerStep(
        micro_batches=(((5,),), ((4,),)), denominators=Denominators(sequences=2, tokens=4)
    )
    plan = StepPlan(
        step=0, rollouts=(), advantages=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0), optimizer_steps=(one, two)
    )
    mine = {3: FIVE, 4: THREE}
    steps = Batcher(WHOLE, SHAPE, torch.device("cpu")).optimizer_steps(plan, 1, mine)
    assert [[batch.targets.tolist() for batch in step] for step in steps] == [
        [[4, 5, 6], []],
        [[9, 10]],
    ]
    assert [[batch.advantages.tolist() for batch in step] for step in steps] == [
        [[3.0] * 3, []],
        [[4.0] * 2],
    ]


@pytest.mark.parametrize("view", [WHOLE, RankView(layers=((0, 1, 2),), sp_size=2)])
def test_the_last_sequence_is_padded_to_what_fp8_products_take(view: RankView) -> None:
    batcher = Batcher(view, SHAPE, torch.device("cpu"), multiple=16)
    batch = batcher.pack([FIVE, THREE], [0.5, 0.25])
    rows = 16 * view.row_multiple
    assert batch.inputs.num_tokens == rows
    assert batch.inputs.cu_seqlens.tolist() == [0, 5 + 5 % view.row_multiple, rows]
    assert batch.inputs.real_rows is not None and int(batch.inputs.real_rows.sum()) == 8
    assert batch.targets.tolist() == [4, 5, 6, 9, 10]
    assert batcher.pack([], []).inputs.num_tokens == rows, "a filler too"
