"""Responses in pieces: what is requested next, and what the joined response is."""

import numpy as np
import pytest

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.environments.rollout_builder import RolloutBuilder
from megatron_rl.rollouts.collector.engines.partial_response import PartialResponse
from sglang_bridge.generation import FinishReason, Generation, VersionSpan

EOS = 9
PROMPT = (1, 2, 3)
SAMPLING = Sampling(max_new_tokens=6, temperature=1.0, stop_token_ids=(EOS,))


def piece(
    tokens: list[int],
    num_rows: int | None,
    *,
    reason: FinishReason = FinishReason.ABORT,
    version: str = "4",
    retractions: int = 0,
) -> Generation:
    """A piece whose rows of routes hold its first token. num_rows: None without routes."""
    routes = None if num_rows is None else np.full((num_rows, 2, 1), tokens[0], np.int32)
    return Generation(
        output_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        routes=routes,
        finish_reason=reason,
        version_spans=(VersionSpan(version, 0, len(tokens)),),
        cached_tokens=0,
        retractions=retractions,
    )


def test_the_rest_is_requested_after_the_tokens_so_far() -> None:
    response = PartialResponse(PROMPT, SAMPLING)
    assert (response.input_ids, response.first_route_row) == ([1, 2, 3], 0)
    response.add(piece([5, 6], 4))
    assert response.input_ids == [1, 2, 3, 5, 6]
    assert response.next_sampling().max_new_tokens == 4
    # Inputs 0 to 3 have rows. Input 4, the token 6, has none yet.
    assert response.first_route_row == 4
    assert not response.is_complete


def test_pieces_are_joined_with_the_routes_of_their_own_reading() -> None:
    response = PartialResponse(PROMPT, SAMPLING)
    response.add(piece([5, 6], 4, version="4"))
    response.add(piece([7], 1, version="4"))
    response.add(piece([8, EOS], 2, version="5", reason=FinishReason.STOP))
    generation = response.generation()
    assert generation.output_ids.tolist() == [5, 6, 7, 8, EOS]
    assert generation.logprobs.tolist() == [-5, -6, -7, -8, -EOS]
    assert generation.routes is not None
    assert generation.routes[:, 0, 0].tolist() == [5, 5, 5, 5, 7, 8, 8]  # 3 + 5 - 1 rows
    assert generation.version_spans == (VersionSpan("4", 0, 3), VersionSpan("5", 3, 5))
    assert generation.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([5, EOS], FinishReason.STOP), ([5, 5, 5, 5, 5, 5], FinishReason.LENGTH)],
)
def test_an_interrupted_response_at_its_end_is_complete(
    tokens: list[int], reason: FinishReason
) -> None:
    response = PartialResponse(PROMPT, SAMPLING)
    response.add(piece(tokens, 2 + len(tokens)))
    assert response.is_complete
    assert response.generation().finish_reason is reason


def test_a_piece_without_tokens_changes_nothing() -> None:
    response = PartialResponse(PROMPT, SAMPLING)
    empty = Generation(
        output_ids=np.array([], np.int32),
        logprobs=np.array([], np.float32),
        routes=None,
        finish_reason=FinishReason.ABORT,
        version_spans=(VersionSpan("4", 0, 0),),
        cached_tokens=0,
        retractions=0,
    )
    response.add(empty)
    assert (response.pieces, response.first_route_row, response.is_complete) == ([], 0, False)


def test_pieces_without_routes_are_joined_without_them() -> None:
    response = PartialResponse(PROMPT, SAMPLING)
    response.add(piece([5], None))
    response.add(piece([EOS], None, reason=FinishReason.STOP))
    assert response.generation().routes is None


def test_a_retraction_of_one_piece_leaves_the_routes_of_the_others_alone() -> None:
    """So a response of two versions is not rejected as one whose routes were written again."""
    response = PartialResponse(PROMPT, SAMPLING)
    response.add(piece([5, 6], 4, version="4", retractions=1))
    response.add(piece([EOS], 1, version="5", reason=FinishReason.STOP))
    prompt = Prompt(id="p", token_ids=PROMPT, answer="", task="")
    shape = RouteShape(moe_layers=(0, 1), num_hidden_layers=2, num_experts=10, topk=1)
    builder = RolloutBuilder("r", prompt, 0, shape)
    builder.sample(response.generation())
    rollout = builder.rollout(FinishReason.STOP, trainable=True)
    assert [segment.version for segment in rollout.segments] == [4, 4, 5]
