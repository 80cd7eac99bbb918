"""The order of requests: earlier steps, then longer rollouts, then submission."""

import math
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.selector import Extension
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.wire.messages import GroupRequest
from tests.support.collectors import request
from tests.support.scripted_hub import ScriptedHub

# Tokens by prompt. Requests for the prompts come in this order
LENGTHS = {"a": 3, "b": 0, "c": 9, "d": 3, "e": 5}


def open_queue(order: str) -> tuple[RolloutQueue, ScriptedHub]:
    """Return a queue that expects `LENGTHS`, and its hub."""
    hub = ScriptedHub(0, lambda prompt_id, place: 1.0)
    settings = RolloutSettings(max_new_tokens=8, order=order)  # type: ignore[arg-type]
    queue = RolloutQueue(hub, settings)  # type: ignore[arg-type]
    queue.expected_tokens = lambda prompt: LENGTHS.get(prompt.id, 0)
    queue.configure({})
    return queue, hub


def request_for(name: str, step: int = 1, **changes: Any) -> GroupRequest:
    """Return the request of a step for a prompt."""
    prompt = Prompt(id=name, token_ids=(1,), answer="1", task="t")
    sampling = msgspec.structs.replace(request(name).sampling, max_new_tokens=8)
    group_id = f"step-{step}-{name}"
    first = msgspec.structs.replace(request(group_id), prompt=prompt, sampling=sampling, step=step)
    return msgspec.structs.replace(first, **changes)


def requests_of(hub: ScriptedHub) -> list[GroupRequest]:
    """Return the requests that collectors have, in the order in which they got them."""
    return list(hub.collectors[0].running.values())


@pytest.mark.parametrize(("order", "names"), [("longest", "ceadb"), ("submission", "abcde")])
def test_requests_go_to_collectors_in_their_order(order: str, names: str) -> None:
    queue, hub = open_queue(order)
    queue.submit([request_for(name) for name in LENGTHS])
    assert [r.prompt.id for r in requests_of(hub)] == list(names)


def test_expected_tokens_never_limit_a_response() -> None:
    queue, hub = open_queue("longest")
    queue.submit([request_for("a"), request_for("c")])
    assert [(r.expected_tokens, r.sampling.max_new_tokens) for r in requests_of(hub)] == [
        (8, 8),
        (3, 8),
    ]


def test_earlier_steps_go_before_longer_rollouts_and_evaluations_before_both() -> None:
    queue, hub = open_queue("longest")
    hub.lose(0)
    queue.count_in_flight()  # takes the loss in: both requests wait for the next collector
    evaluation = request_for("e", 0, evaluation=True)
    queue.submit([request_for("c", 3), request_for("a", 2), evaluation])
    assert [(r.step, r.prompt.id) for r in requests_of(hub)] == [(0, "e"), (2, "a"), (3, "c")]


def test_without_order_a_collector_learns_neither_step_nor_length() -> None:
    queue, hub = open_queue("submission")
    queue.submit([request_for("c", 3, expected_tokens=7), request_for("a", 2)])
    assert [(r.step, r.expected_tokens) for r in requests_of(hub)] == [(0, 0), (0, 0)]


def test_a_request_that_says_its_length_is_not_asked_about() -> None:
    queue, hub = open_queue("longest")
    queue.submit([request_for("a", expected_tokens=1), request_for("x")])
    assert [(r.prompt.id, r.expected_tokens) for r in requests_of(hub)] == [("a", 1), ("x", 0)]


def test_the_rest_of_a_group_has_the_place_of_its_probe() -> None:
    queue, hub = open_queue("longest")
    queue.submit([request_for("a", extension=Extension(4, kinds=()))])
    (first,) = requests_of(hub)
    assert (first.rest().step, first.rest().expected_tokens) == (1, 3)
    assert first.rest().priority() == first.priority() == (1, -3)


@pytest.mark.parametrize("tokens", [-1, 9, math.nan, 2.5, math.inf])
def test_expected_tokens_that_cannot_be_are_refused(tokens: float) -> None:
    with pytest.raises(
        ValueError, match=rf"step-1-a: expected_tokens={tokens}.*from 0 to max_new_"
    ):
        request_for("a", expected_tokens=tokens)


def test_sampled_tokens_lower_what_is_expected() -> None:
    first = request_for("a", expected_tokens=5)
    assert [first.priority(num) for num in (0, 2, 7)] == [(1, -5), (1, -3), (1, 0)]
