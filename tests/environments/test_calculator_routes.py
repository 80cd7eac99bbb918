"""Routes of every turn with the calculator: from the requests of an engine to a micro-batch.

A small HTTP server answers as an engine does. Each row of its routes names the request that
recorded it and the position of its token.
"""

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Role, Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.rollouts.collector.episode_runner import EpisodeRunner
from megatron_rl.rollouts.collector.progress import ScoredRollout
from megatron_rl.rollouts.wire.codec import decode, encode, select_layers
from megatron_rl.rollouts.wire.messages import FromCollector, GroupRequest
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from sglang_bridge.engine import Engine
from tests.support.fake_engine import (
    LAYERS,
    TOPK,
    Answer,
    Reply,
    configuration,
    fake_engine,
    reply,
)
from tests.support.scripted_model import EOS, PROMPT, TOKENIZER

# The first two responses end with a call, which the calculator answers with 03 and 11
RESPONSES = ("1+2=", "4+7=", "46")
RESULTS = ("03", "11")
EXPERTS = 8
# Prompt, response, result, response, result, response. A response has an end-of-sequence token.
LENGTHS = (6, 5, 2, 5, 2, 3)
# The request that first reads each token. A sampled token is first read by the next request if it
# is the last of its response. The very last token is never read.
FIRST_READ = [0] * (6 + 4) + [1] * (1 + 2 + 4) + [2] * (1 + 2 + 2)


def rows_of(turn: int, num_inputs: int) -> npt.NDArray[np.int32]:
    """Routes of a request, [num_inputs, LAYERS, 2].

    The first expert tells position and layer. The distance of the second one tells the turn.
    """
    first = (np.arange(num_inputs)[:, None] + 3 * np.arange(LAYERS)[None]) % EXPERTS
    return np.stack([first, (first + 1 + turn) % EXPERTS], axis=-1).astype(np.int32)


async def play_with(answer: Answer) -> Rollout:
    """Play an episode with an engine that answers so."""

    async def ignore(message: FromCollector) -> None:
        pass

    async with fake_engine(answer) as url:
        settings = configuration(environment=EnvironmentSettings(name="calculator"))
        sampling = Sampling(max_new_tokens=64, temperature=1.0, stop_token_ids=(EOS,))
        request = GroupRequest(group_id="g", prompt=PROMPT, num_samples=1, sampling=sampling)
        with ThreadPoolExecutor(1) as threads:
            runner = EpisodeRunner(settings, ignore, threads)
            await runner.engines.set_engines([Engine(url=url)])
            runner.announce(request)
            result = await runner.run(request, 0)
            await runner.close()
        assert isinstance(result, ScoredRollout), result
        return result.rollout


@cache
def play() -> tuple[Rollout, tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Play an episode of three turns.

    Returns its rollout, and of each request its tokens and the number of rows in its answer.
    """
    requests: list[tuple[int, ...]] = []
    num_rows: list[int] = []

    def answer(turn: int, request: Reply) -> Reply:
        requests.append(tuple(request["input_ids"]))
        text = RESPONSES[turn]
        rows = rows_of(turn, len(request["input_ids"]) + len(text))
        rows = rows[request.get("routed_experts_start_len", 0) :]
        num_rows.append(len(rows))
        encoded_rows = base64.b64encode(rows.tobytes()).decode()
        return reply(request, text, routed_experts=encoded_rows, weight_version=str(3 + turn))

    return asyncio.run(play_with(answer)), tuple(requests), tuple(num_rows)


def whole_text() -> list[int]:
    tokens = list(PROMPT.token_ids)
    for response, result in zip(RESPONSES, (*RESULTS, ""), strict=True):
        tokens += [*TOKENIZER.encode(response), EOS, *TOKENIZER.encode(result)]
    return tokens


def test_each_request_reads_the_turns_before_it_and_their_results() -> None:
    rollout, requests, _ = play()
    tokens = [int(token) for segment in rollout.segments for token in segment.tokens]
    assert tokens == whole_text()
    assert [list(request) for request in requests] == [tokens[:end] for end in (6, 13, 20)]


def test_each_request_gets_the_rows_alone_that_are_new() -> None:
    _, requests, num_rows = play()
    assert list(num_rows) == [FIRST_READ.count(turn) for turn in range(len(requests))]


def test_each_turn_has_the_rows_of_its_tokens() -> None:
    rollout, *_ = play()
    ends = np.cumsum(LENGTHS).tolist()
    bounds = list(zip([0, *ends[:-1]], [*ends[:-1], ends[-1] - 1], strict=True))
    turns = [(s.role, s.trainable, s.version, s.route_rows) for s in rollout.segments]
    assert turns == [
        (Role.PROMPT, False, 3, bounds[0]),
        (Role.RESPONSE, True, 3, bounds[1]),
        (Role.TOOL, False, 4, bounds[2]),
        (Role.RESPONSE, True, 4, bounds[3]),
        (Role.TOOL, False, 5, bounds[4]),
        (Role.RESPONSE, True, 5, bounds[5]),
    ]


def expected_routes() -> npt.NDArray[np.int32]:
    """Return the row of each input, from the request that first read it."""
    rows = [rows_of(turn, position + 1)[position] for position, turn in enumerate(FIRST_READ)]
    return np.stack(rows)


def test_each_row_is_from_the_request_that_first_read_the_token() -> None:
    rollout, *_ = play()
    assert rollout.routes is not None
    np.testing.assert_array_equal(rollout.routes, expected_routes())


def pack(layers: tuple[int, ...]) -> MicroBatch:
    """Pack the rollout three times, as a pipeline stage with these layers gets it."""
    rollout, *_ = play()
    rollout = select_layers(decode(encode(rollout)), layers)
    shape = RouteShape(
        moe_layers=tuple(range(LAYERS)), num_hidden_layers=LAYERS, num_experts=EXPERTS, topk=TOPK
    )
    batcher = Batcher(RankView(layers=(layers,)), shape, torch.device("cpu"))
    return batcher.pack([rollout] * 3, [1.0] * 3)


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (2, 3)])
def test_a_micro_batch_replays_the_rows_at_the_positions_of_their_tokens(
    layers: tuple[int, ...],
) -> None:
    inputs = pack(layers).inputs
    assert inputs.input_ids.tolist() == [whole_text()[:-1] * 3]
    assert inputs.routes is not None
    rows = expected_routes()[:, list(layers)]
    np.testing.assert_array_equal(inputs.routes, np.concatenate([rows] * 3))


def test_the_sampled_tokens_of_every_turn_train_and_no_others() -> None:
    batch = pack((0, 1, 2, 3))
    tokens = whole_text()
    trained_rows = [place - 1 for place in (*range(6, 11), *range(13, 18), *range(20, 23))]
    starts = [copy * (len(tokens) - 1) for copy in range(3)]
    assert batch.rows.tolist() == [start + row for start in starts for row in trained_rows]
    assert batch.targets.tolist() == [tokens[row + 1] for row in trained_rows] * 3
