"""Engine replies: what is decoded, and what is rejected by name."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.generation import GenerationRejected, VersionSpan, decode_generation

PROMPT, LAYERS, TOPK = 3, 2, 2


def reply(response: int = 2, **meta: Any) -> dict[str, Any]:
    """A consistent reply to three prompt tokens; inputs are prompt + response - 1."""
    rows = PROMPT + response - 1
    routes = np.arange(rows * LAYERS * TOPK, dtype="<i4")
    fields = {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "7",
        "output_token_logprobs": [[-0.5 - t, 10 + t, None] for t in range(response)],
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
        "cached_tokens": 1,
        "num_retractions": 2,
        "e2e_latency": 0.1,
    }
    return {"output_ids": [10 + t for t in range(response)], "meta_info": {**fields, **meta}}


def decode(content: Any, shape: tuple[int, int] | None = (LAYERS, TOPK)) -> Any:
    return decode_generation(json.dumps(content).encode(), num_prompt_tokens=PROMPT, route_shape=shape)


def rejection(content: Any) -> str:
    with pytest.raises(GenerationRejected) as caught:
        decode(content)
    return caught.value.reason


def test_a_consistent_reply() -> None:
    generation = decode(reply())
    assert generation.output_ids.tolist() == [10, 11]
    assert generation.logprobs.dtype == np.float32
    assert generation.logprobs.tolist() == [-0.5, -1.5]
    assert generation.routes.shape == (4, LAYERS, TOPK)
    assert generation.routes[1].tolist() == [[4, 5], [6, 7]]
    assert (generation.finish_reason, generation.cached_tokens, generation.retractions) == ("stop", 1, 2)
    assert generation.version_spans == (VersionSpan("7", 0, 2),)


def test_routes_not_asked_for_are_not_decoded() -> None:
    assert decode(reply(routed_experts=None), shape=None).routes is None


def test_versions_of_a_sample_that_spans_an_update() -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    assert decode(reply(weight_versions=spans)).weight_versions == ("6", "7")


def test_an_aborted_reply_has_no_routes() -> None:
    aborted = reply(0, finish_reason={"type": "abort", "message": "m"}, routed_experts=None)
    generation = decode(aborted)
    assert generation.finish_reason == "abort"
    assert generation.routes is None
    assert len(generation.output_ids) == 0


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"finish_reason": None}, "finish_reason"),
        ({"finish_reason": {"type": "tired"}}, "finish_reason"),
        ({"output_token_logprobs": [[-0.5, 10, None]]}, "logprobs_length"),
        ({"output_token_logprobs": [[-0.5, 10, None], [-1.5, 99, None]]}, "logprobs_length"),
        ({"output_token_logprobs": [[-0.5, 10, None], [None, 11, None]]}, "logprobs_nonfinite"),
        ({"output_token_logprobs": [[-0.5, 10, None], [-1e300, 11, None]]}, "logprobs_nonfinite"),
        ({"routed_experts": None}, "routes_missing"),
        ({"routed_experts": "%%%"}, "routes_encoding"),
        ({"routed_experts": base64.b64encode(bytes(60)).decode()}, "routes_length"),
        ({"routed_experts": base64.b64encode(bytes(63)).decode()}, "routes_length"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 1}]}, "versions"),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 2}]}, "versions"),
        ({"weight_version": 7}, "malformed"),
    ],
)
def test_inconsistent_replies_are_rejected_by_name(meta: dict, reason: str) -> None:
    assert rejection(reply(**meta)) == reason


@pytest.mark.parametrize("content", [{}, [], {"error": "x"}, {"output_ids": "abc"}])
def test_what_is_no_reply_is_malformed(content: Any) -> None:
    assert rejection(content) == "malformed"


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_rejected_not_raised_through(body: bytes) -> None:
    with pytest.raises(GenerationRejected):
        decode_generation(body, num_prompt_tokens=PROMPT)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_routes_arrive_as_they_were_sent(response: int, layers: int, topk: int, seed: int) -> None:
    rows = PROMPT + response - 1
    sent = np.random.default_rng(seed).integers(0, 128, (rows, layers, topk)).astype("<i4")
    content = reply(response, routed_experts=base64.b64encode(sent.tobytes()).decode())
    assert np.array_equal(decode(content, (layers, topk)).routes, sent)
