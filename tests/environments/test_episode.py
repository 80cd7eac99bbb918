"""Episodes with a scripted model: tokens, masks, log-probabilities, versions and routes."""

import asyncio
from dataclasses import dataclass, field
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
from tests.support.processor_time import processor_seconds
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


def play_turns(
    turns: list[Turn], *between: str, **rules: object
) -> tuple[Rollout, Episode, ScriptedModel]:
    """Respond once for each turn, and observe a text after each turn but the last."""
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


def rejection_of(turn: Turn, **rules: object) -> str:
    with pytest.raises(RolloutRejected) as error:
        play_turns([turn], **rules)
    return error.value.reason


def test_one_turn() -> None:
    rollout, episode, model = play_turns([Turn.saying("046")])
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
    assert model.requests == [(PROMPT.token_ids, 32)]


def test_two_turns_with_an_observation_between() -> None:
    first = (*TOKENIZER.encode("4"), EOS)
    observation = TOKENIZER.encode("no,")
    second = (*TOKENIZER.encode("046"), EOS)
    turns = [Turn.saying("4", version="3"), Turn.saying("046", version="5")]
    rollout, episode, model = play_turns(turns, "no,")
    second_request = (*PROMPT.token_ids, *first, *observation)
    assert model.requests == [(PROMPT.token_ids, 32), (second_request, 32 - 2 - 3)]
    assert tokens_of(rollout) == [*second_request, *second]
    assert (episode.text, episode.sampled_tokens) == ("046", 6)


def test_segments_and_routes_of_two_turns() -> None:
    turns = [Turn.saying("4", version="3"), Turn.saying("046", version="5")]
    rollout, _, _ = play_turns(turns, "no,")
    segments = [
        (s.role, s.trainable, s.version, s.logprobs is not None, s.route_rows)
        for s in rollout.segments
    ]
    assert segments == [
        (Role.PROMPT, False, 3, False, (0, N)),
        (Role.RESPONSE, True, 3, True, (N, N + 2)),
        (Role.TOOL, False, 5, False, (N + 2, N + 5)),
        (Role.RESPONSE, True, 5, True, (N + 5, N + 8)),
    ]
    # The first turn's last token is first an input in the second turn, which records its row.
    routes = np.concatenate([wire_rows(1, N + 1), wire_rows(2, N + 8)[N + 1 :]])[:, [0, 2]]
    np.testing.assert_array_equal(rollout.routes, routes)


def test_one_segment_for_each_weight_version() -> None:
    turn = Turn(TOKENIZER.encode("0469"), (("3", 1), ("4", 3)), FinishReason.LENGTH)
    rollout, _, _ = play_turns([turn])
    assert [(len(s.tokens), s.version, s.route_rows) for s in rollout.segments] == [
        (N, 3, (0, N)),
        (1, 3, (N, N + 1)),
        (3, 4, (N + 1, N + 3)),
    ]


def test_input_of_a_retracted_request_has_its_last_version() -> None:
    turn = Turn(TOKENIZER.encode("04"), (("3", 1), ("4", 1)), retractions=1)
    rollout, _, _ = play_turns([Turn.saying("4", version="2"), turn], "no", routes=None)
    assert [s.version for s in rollout.segments] == [2, 2, 4, 3, 4]
    assert rejection_of(turn) == "routes_rewritten"


def test_budget_limits_sampled_and_observed_tokens() -> None:
    rollout, episode, model = play_turns([Turn.saying("4")], "0123", budget=6)
    assert len(model.requests) == 1  # 2 sampled and 4 observed tokens use up the budget
    # The rollout does not contain the observation, because no response follows it.
    assert tokens_of(rollout) == [*PROMPT.token_ids, *TOKENIZER.encode("4"), EOS]
    assert len(rollout.routes) == len(tokens_of(rollout)) - 1  # type: ignore[arg-type]
    assert rollout.finish_reason is FinishReason.LENGTH
    assert episode.text == ""


def test_an_observation_far_beyond_the_budget_is_not_read_whole() -> None:
    """A collector that encodes for 12 seconds counts as lost."""

    def play() -> None:
        _, episode, model = play_turns([Turn.saying("4")], "01+" * 4_000_000, budget=64)
        assert len(model.requests) == 1
        assert episode.finish_reason is FinishReason.LENGTH

    assert processor_seconds(play) < 3.0


def test_truncated_response_is_the_last() -> None:
    _, episode, model = play_turns(
        [Turn(TOKENIZER.encode("04"), (("3", 2),), FinishReason.LENGTH)], "no"
    )
    assert len(model.requests) == 1
    assert asyncio.run(episode.respond()) == Response("", FinishReason.LENGTH)


def test_truncated_rollouts_are_trained_only_with_the_setting() -> None:
    cut = Turn(TOKENIZER.encode("04"), (("3", 2),), FinishReason.LENGTH)
    for is_trained in (True, False):
        rollout, _, _ = play_turns([Turn.saying("4"), cut], "no", train_truncated=is_trained)
        assert [s.trainable for s in rollout.segments] == [False, is_trained, False, is_trained]
    rollout, _, _ = play_turns([Turn.saying("4")], train_truncated=False)
    assert rollout.segments[1].trainable


def test_demonstration_is_trained_without_logprobs() -> None:
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


def test_demonstration_needs_budget_and_has_no_routes() -> None:
    with pytest.raises(RolloutRejected, match=r"rollout\.max_new_tokens") as too_long:
        open_episode(ScriptedModel([]), budget=3).demonstrate("046")
    assert too_long.value.reason == "too_long"
    episode = open_episode(ScriptedModel([]))
    episode.demonstrate("046")
    with pytest.raises(RolloutRejected, match=r"train\.replay=trainer or off") as no_routes:
        episode.rollout()
    assert no_routes.value.reason == "routes_missing"


def test_unusable_replies_are_rejected_by_name() -> None:
    assert rejection_of(Turn((), (("3", 0),))) == "empty"
    assert rejection_of(Turn.saying("046", finish=FinishReason.ABORT)) == "aborted"
    assert rejection_of(Turn.saying("046", version="default")) == "version"
    assert rejection_of(Turn.saying("046", routes=False)) == "routes_missing"
    with pytest.raises(RolloutRejected) as error:
        open_episode(ScriptedModel([])).rollout()
    assert error.value.reason == "no_response"


def test_tokens_of_an_aborted_response_are_counted() -> None:
    episode = open_episode(ScriptedModel([Turn.saying("046", finish=FinishReason.ABORT)]))
    with pytest.raises(RolloutRejected):
        asyncio.run(episode.respond())
    assert episode.sampled_tokens == 4


def test_routes_are_checked_only_if_recorded() -> None:
    few_experts = msgspec.structs.replace(ROUTES, num_experts=2)
    with pytest.raises(RouteError) as error:
        play_turns([Turn.saying("046")], routes=few_experts)
    assert error.value.reason == "routes_range"
    one_layer = RouteShape(moe_layers=(0,), num_hidden_layers=1, num_experts=8, topk=2)
    with pytest.raises(RouteError) as error:
        play_turns([Turn.saying("046")], routes=one_layer)
    assert error.value.reason == "routes_shape"
    rollout, _, _ = play_turns([Turn.saying("046")], routes=None)
    assert rollout.routes is None


def test_observation_with_unknown_characters_is_refused() -> None:
    with pytest.raises(UnknownText):
        open_episode(ScriptedModel([])).observe("é")


turn_texts = st.text("0123456789", min_size=1, max_size=5)


@dataclass
class Script:
    """Turns of a model, and what the rollout must hold.

    first_calls: for each token, the number of the call that first reads it.
    """

    turns: list[Turn] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=lambda: list(PROMPT.token_ids))
    first_calls: list[int] = field(default_factory=lambda: [1] * N)

    def add(self, text: str, observation: str, cut: int, increment: int) -> None:
        """Add a turn whose weight version grows by `increment` after `cut` tokens."""
        call = len(self.turns) + 1
        ids = (*TOKENIZER.encode(text), EOS)
        cut = min(cut, len(ids))
        spans = ((str(call), cut), (str(call + increment), len(ids) - cut))
        self.turns.append(Turn(ids, tuple(span for span in spans if span[1])))
        observed_ids = TOKENIZER.encode(observation)
        self.token_ids += [*ids, *observed_ids]
        # The next call reads the last sampled token and the observation.
        self.first_calls += [call] * (len(ids) - 1) + [call + 1] * (1 + len(observed_ids))


def assert_segments_cover(rollout: Rollout, num_tokens: int) -> None:
    bounds = [s.route_rows for s in rollout.segments]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_tokens - 1
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    for segment in rollout.segments:
        is_response = segment.role is Role.RESPONSE
        assert segment.trainable == is_response
        assert (segment.logprobs is not None) == is_response


@given(
    st.lists(
        st.tuples(turn_texts, turn_texts | st.just(""), st.integers(0, 4), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_each_route_row_is_from_the_call_that_first_read_the_token(
    turns: list[tuple[str, str, int, int]],
) -> None:
    """For any turns, spans and observations, segments cover all tokens and rows all inputs."""
    script = Script()
    for turn in turns:
        script.add(*turn)
    observations = [turn[1] for turn in turns]
    rollout, _, _ = play_turns(script.turns, *observations[:-1], budget=200)
    num_tokens = len(script.token_ids) - len(TOKENIZER.encode(observations[-1]))
    assert tokens_of(rollout) == script.token_ids[:num_tokens]
    assert rollout.routes is not None and len(rollout.routes) == num_tokens - 1
    for position, row in enumerate(rollout.routes):
        call_rows = wire_rows(script.first_calls[position], num_tokens)
        np.testing.assert_array_equal(row, call_rows[position, [0, 2]])
    assert_segments_cover(rollout, num_tokens)
