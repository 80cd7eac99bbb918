"""Episodes against a scripted model: tokens, masks, log-probabilities, versions and route rows by
hand.
"""

import asyncio
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contracts.rollout import FinishReason, Role, Rollout
from megatron_rl.contracts.routes import RouteError, RouteShape
from megatron_rl.environments.episode import Episode, Response
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.tokenizer import UnknownText
from tests.support.scripted_model import (
    EOS,
    PROMPT,
    ROUTES,
    TOKENIZER,
    ScriptedModel,
    Turn,
    logprobs,
    open_episode,
    wire_rows,
)

N = len(PROMPT.token_ids)


def played(
    turns: list[Turn], *between: str, **rules: object
) -> tuple[Rollout, Episode, ScriptedModel]:
    """Respond once for each turn, observing a text after each but the last."""
    model = ScriptedModel(turns)
    episode = open_episode(model, **rules)  # type: ignore[arg-type]

    async def play() -> None:
        await episode.respond()
        for text in between:
            episode.observe(text)
            await episode.respond()

    asyncio.run(play())
    return episode.rollout(), episode, model


def tokens_of(rollout: Rollout) -> list[int]:
    return [int(token) for segment in rollout.segments for token in segment.tokens]


def rejected(turn: Turn, **rules: object) -> str:
    with pytest.raises(RolloutRejected) as caught:
        played([turn], **rules)
    return caught.value.reason


def test_one_turn() -> None:
    rollout, episode, model = played([Turn.saying("046")])
    prompt, response = rollout.segments
    assert (prompt.role, prompt.trainable, prompt.logprobs, prompt.route_rows) == (
        Role.PROMPT,
        False,
        None,
        (0, N),
    )
    assert (response.role, response.trainable, response.route_rows) == (
        Role.RESPONSE,
        True,
        (N, N + 3),
    )
    assert prompt.version == response.version == 3
    np.testing.assert_array_equal(response.logprobs, logprobs([*TOKENIZER.encode("046"), EOS]))
    np.testing.assert_array_equal(rollout.routes, wire_rows(1, N + 3)[:, [0, 2]])
    assert rollout.routes is not None and rollout.routes.dtype == np.uint8
    assert (episode.text, episode.sampled_tokens) == ("046", 4)
    assert rollout.finish_reason is episode.finish_reason is FinishReason.STOP
    assert model.asked == [(PROMPT.token_ids, 32)]


def test_two_turns_with_an_observation_between() -> None:
    rollout, episode, model = played(
        [Turn.saying("4", version="3"), Turn.saying("046", version="5")], "no,"
    )
    first, seen, second = (
        (*TOKENIZER.encode("4"), EOS),
        TOKENIZER.encode("no,"),
        (*TOKENIZER.encode("046"), EOS),
    )
    assert model.asked == [(PROMPT.token_ids, 32), ((*PROMPT.token_ids, *first, *seen), 32 - 2 - 3)]
    assert tokens_of(rollout) == [*PROMPT.token_ids, *first, *seen, *second]
    roles = [(s.role, s.trainable, s.version, s.logprobs is not None) for s in rollout.segments]
    assert roles == [
        (Role.PROMPT, False, 3, False),
        (Role.RESPONSE, True, 3, True),
        (Role.TOOL, False, 5, False),
        (Role.RESPONSE, True, 5, True),
    ]
    assert [s.route_rows for s in rollout.segments] == [
        (0, N),
        (N, N + 2),
        (N + 2, N + 5),
        (N + 5, N + 8),
    ]
    # The first turn's last token was first an input in the second turn: its row is the second
    # turn's.
    expected = np.concatenate([wire_rows(1, N + 1), wire_rows(2, N + 8)[N + 1 :]])[:, [0, 2]]
    np.testing.assert_array_equal(rollout.routes, expected)
    assert (episode.text, episode.sampled_tokens) == ("046", 6)


def test_one_segment_for_each_weight_version() -> None:
    turn = Turn(TOKENIZER.encode("0469"), (("3", 1), ("4", 3)), FinishReason.LENGTH)
    rollout, _, _ = played([turn])
    assert [(len(s.tokens), s.version, s.route_rows) for s in rollout.segments] == [
        (N, 3, (0, N)),
        (1, 3, (N, N + 1)),
        (3, 4, (N + 1, N + 3)),
    ]


def test_what_a_retracted_request_read_has_its_last_version() -> None:
    retracted = Turn(TOKENIZER.encode("04"), (("3", 1), ("4", 1)), retractions=1)
    rollout, _, _ = played([Turn.saying("4", version="2"), retracted], "no", routes=None)
    assert [s.version for s in rollout.segments] == [2, 2, 4, 3, 4]
    assert rejected(retracted) == "routes_rewritten"


def test_the_budget_bounds_sampled_and_observed_tokens() -> None:
    rollout, episode, model = played([Turn.saying("4")], "0123", budget=6)
    assert len(model.asked) == 1  # 2 sampled and 4 observed: nothing is left to ask for
    assert tokens_of(rollout) == [
        *PROMPT.token_ids,
        *TOKENIZER.encode("4"),
        EOS,
    ]  # nobody read the observation
    assert len(rollout.routes) == len(tokens_of(rollout)) - 1  # type: ignore[arg-type]
    assert rollout.finish_reason is FinishReason.LENGTH and episode.text == ""


def test_a_response_that_was_cut_off_is_the_last() -> None:
    _, episode, model = played(
        [Turn(TOKENIZER.encode("04"), (("3", 2),), FinishReason.LENGTH)], "no"
    )
    assert len(model.asked) == 1
    assert asyncio.run(episode.respond()) == Response("", FinishReason.LENGTH)


def test_a_truncated_rollout_is_trained_only_if_told_to() -> None:
    cut = Turn(TOKENIZER.encode("04"), (("3", 2),), FinishReason.LENGTH)
    for truncated in (True, False):
        rollout, _, _ = played([Turn.saying("4"), cut], "no", train_truncated=truncated)
        assert [s.trainable for s in rollout.segments] == [False, truncated, False, truncated]
    rollout, _, _ = played([Turn.saying("4")], train_truncated=False)
    assert rollout.segments[1].trainable


def test_a_demonstration_is_trained_without_logprobs() -> None:
    episode = open_episode(ScriptedModel([]), routes=None)
    episode.demonstrate("046")
    rollout = episode.rollout()
    prompt, response = rollout.segments
    assert tokens_of(rollout) == [*PROMPT.token_ids, *TOKENIZER.encode("046"), EOS]
    assert (response.role, response.trainable, response.logprobs) == (Role.RESPONSE, True, None)
    assert (prompt.route_rows, response.route_rows, rollout.routes) == ((0, N), (N, N + 3), None)
    assert (episode.text, rollout.finish_reason, episode.sampled_tokens) == (
        "046",
        FinishReason.STOP,
        0,
    )


def test_a_demonstration_needs_room_and_has_no_routes() -> None:
    with pytest.raises(RolloutRejected, match=r"rollout\.max_new_tokens") as too_long:
        open_episode(ScriptedModel([]), budget=3).demonstrate("046")
    assert too_long.value.reason == "too_long"
    episode = open_episode(ScriptedModel([]))
    episode.demonstrate("046")
    with pytest.raises(RolloutRejected, match=r"train\.replay=trainer or off") as no_routes:
        episode.rollout()
    assert no_routes.value.reason == "routes_missing"


def test_replies_that_cannot_be_used_are_rejected_by_name() -> None:
    assert rejected(Turn((), (("3", 0),))) == "empty"
    assert rejected(Turn.saying("046", finish=FinishReason.ABORT)) == "aborted"
    assert rejected(Turn.saying("046", version="default")) == "version"
    assert rejected(Turn.saying("046", routes=False)) == "routes_missing"
    with pytest.raises(RolloutRejected) as caught:
        open_episode(ScriptedModel([])).rollout()
    assert caught.value.reason == "empty"


def test_routes_are_checked_where_they_enter_and_only_when_wanted() -> None:
    few_experts = msgspec.structs.replace(ROUTES, num_experts=2)
    with pytest.raises(RouteError) as caught:
        played([Turn.saying("046")], routes=few_experts)
    assert caught.value.reason == "routes_range"
    one_layer = RouteShape(moe_layers=(0,), num_hidden_layers=1, num_experts=8, topk=2)
    with pytest.raises(RouteError) as caught:
        played([Turn.saying("046")], routes=one_layer)
    assert caught.value.reason == "routes_shape"
    rollout, _, _ = played([Turn.saying("046")], routes=None)
    assert rollout.routes is None


def test_an_observation_without_tokens_for_it_is_refused() -> None:
    with pytest.raises(UnknownText):
        open_episode(ScriptedModel([])).observe("é")


turn_texts = st.text("0123456789", min_size=1, max_size=5)


@given(
    st.lists(
        st.tuples(turn_texts, turn_texts | st.just(""), st.integers(0, 4), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_every_row_is_of_the_call_that_first_read_its_token(
    turns: list[tuple[str, str, int, int]],
) -> None:
    """However many turns, spans and observations: the segments tile the tokens, the rows the
    inputs.
    """
    script, expected, first_call = [], list(PROMPT.token_ids), [1] * N
    for call, (text, seen, cut, grown) in enumerate(turns, start=1):
        ids = (*TOKENIZER.encode(text), EOS)
        cut = min(cut, len(ids))
        spans = tuple(
            (v, n) for v, n in ((str(call), cut), (str(call + grown), len(ids) - cut)) if n
        )
        script.append(Turn(ids, spans))
        # the last sampled token and what is observed next are read by the next call
        expected += [*ids, *TOKENIZER.encode(seen)]
        first_call += [call] * (len(ids) - 1) + [call + 1] * (1 + len(TOKENIZER.encode(seen)))
    rollout, _, _ = played(script, *(seen for _, seen, _, _ in turns[:-1]), budget=200)
    num_tokens = len(expected) - len(TOKENIZER.encode(turns[-1][1]))
    assert tokens_of(rollout) == expected[:num_tokens]
    assert rollout.routes is not None and len(rollout.routes) == num_tokens - 1
    for position, row in enumerate(rollout.routes):
        call = first_call[position]
        np.testing.assert_array_equal(row, wire_rows(call, num_tokens)[position, [0, 2]])
    bounds = [s.route_rows for s in rollout.segments]
    assert bounds[0][0] == 0 and bounds[-1][1] == num_tokens - 1
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    for segment in rollout.segments:
        assert (
            (segment.logprobs is not None) == segment.trainable == (segment.role is Role.RESPONSE)
        )
