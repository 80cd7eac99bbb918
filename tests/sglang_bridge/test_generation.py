"""Engine replies: decoded values, and rejections by name."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.generation import Generation, GenerationRejected, VersionSpan, decode_generation
from sglang_bridge.plugin.narrow_routes import narrow

PROMPT = 3
LAYERS = 2
TOPK = 2


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


def decode(
    content: Any, shape: tuple[int, int] | None = (LAYERS, TOPK), vocab_size: int | None = 100
) -> Generation:
    body = json.dumps(content).encode()
    return decode_generation(
        body, num_prompt_tokens=PROMPT, route_shape=shape, vocab_size=vocab_size
    )


def rejection(content: Any, **rules: Any) -> str:
    with pytest.raises(GenerationRejected) as error_info:
        decode(content, **rules)
    return error_info.value.reason


def reply_with(*ids: int) -> dict[str, Any]:
    """A reply with these output tokens that is otherwise consistent."""
    content = reply(len(ids), output_token_logprobs=[[-0.5, token, None] for token in ids])
    return content | {"output_ids": list(ids)}


def test_consistent_reply_is_decoded() -> None:
    generation = decode(reply())
    assert generation.output_ids.tolist() == [10, 11]
    assert generation.logprobs.dtype == np.float32
    assert generation.logprobs.tolist() == [-0.5, -1.5]
    assert generation.routes.shape == (4, LAYERS, TOPK)
    assert generation.routes[1].tolist() == [[4, 5], [6, 7]]
    assert (generation.finish_reason, generation.cached_tokens, generation.retractions) == (
        "stop",
        1,
        2,
    )
    assert generation.version_spans == (VersionSpan("7", 0, 2),)


def test_unrequested_routes_are_not_decoded() -> None:
    assert decode(reply(routed_experts=None), shape=None).routes is None


def test_versions_of_a_response_that_spans_an_update() -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    assert decode(reply(weight_versions=spans)).weight_versions == ("6", "7")


def test_aborted_reply_keeps_the_sampled_tokens() -> None:
    """An aborted running request has tokens and routes.

    A waiting one has neither.
    """
    abort = {"type": "abort", "message": "m"}
    running = decode(reply(2, finish_reason=abort))
    assert (running.finish_reason, running.output_ids.tolist()) == ("abort", [10, 11])
    assert running.routes is not None and running.routes.shape == (4, LAYERS, TOPK)
    idle = decode(reply(0, finish_reason=abort, routed_experts=None))
    assert (idle.finish_reason, idle.routes, len(idle.output_ids)) == ("abort", None, 0)
    assert rejection(reply(2, finish_reason=abort, routed_experts="AAAA")) == "routes_length"


@pytest.mark.parametrize("token", [-5, 100, 10**6, 2**31, 2**40, 2**70])
def test_token_outside_the_vocabulary_is_rejected(token: int) -> None:
    assert decode(reply_with(0, 99)).output_ids.tolist() == [0, 99]
    assert rejection(reply_with(11, token)) == "token_range"


def test_invalid_token_is_rejected_without_a_known_vocabulary() -> None:
    assert decode(reply_with(10**6), vocab_size=None).output_ids.tolist() == [10**6]
    for token in (-1, 2**31, 2**70):
        assert rejection(reply_with(token), vocab_size=None) == "token_range"


def test_positive_log_probability_is_rejected_except_for_rounding() -> None:
    def entries(value: float) -> list[list[Any]]:
        return [[-0.5, 10, None], [value, 11, None]]

    assert decode(reply(output_token_logprobs=entries(1e-6))).logprobs[1] == np.float32(1e-6)
    for value in (0.01, 0.5, 1e30):
        assert rejection(reply(output_token_logprobs=entries(value))) == "logprobs_positive"


def test_routes_are_found_anywhere_and_with_white_space() -> None:
    content = reply()
    routes = content["meta_info"].pop("routed_experts")
    first = content | {"meta_info": {"routed_experts": routes} | content["meta_info"]}
    for text in (
        json.dumps(first),
        json.dumps(first, separators=(",", ":")),
        json.dumps(first, indent=2),
    ):
        generation = decode_generation(
            text.encode(), num_prompt_tokens=PROMPT, route_shape=(LAYERS, TOPK)
        )
        assert generation.routes is not None and generation.routes.ravel().tolist() == list(
            range(16)
        )
    assert rejection({"routed_experts": routes} | reply(routed_experts=None)) == "routes_missing"
    both = decode({"routed_experts": "AAAA"} | reply())
    assert both.routes is not None and both.routes.ravel().tolist() == list(range(16))
    assert rejection(reply(routed_experts=["AAAA"])) == "malformed"


FORTH_AND_BACK = ((6, 0, 2), (7, 2, 0), (8, 0, 2))  # every token twice


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
        (
            {
                "weight_versions": [
                    {"version": str(v), "start": a, "end": b} for v, a, b in FORTH_AND_BACK
                ]
            },
            "versions",
        ),
        ({"weight_version": 7}, "malformed"),
    ],
)
def test_inconsistent_replies_are_rejected_by_name(meta: dict, reason: str) -> None:
    assert rejection(reply(**meta)) == reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (reply(3, routed_experts="AAAA"), "routes_length"),
        (reply(3, routed_experts=None), "routes_missing"),
        (reply(3, output_token_logprobs=[[None, 10 + t, None] for t in range(3)]), None),
        (reply(3, output_token_logprobs=[]), "logprobs_length"),
        (reply(3, finish_reason={"type": "tired"}), "finish_reason"),
        (reply(3, weight_versions=[{"version": "1", "start": 1, "end": 3}]), "versions"),
        (reply_with(5, 6, 2**40), "token_range"),
        (reply(3, cached_tokens=-1), "malformed"),
        ({"output_ids": [1, 2, 3]}, "malformed"),
        ({"output_ids": ["a"] * 9, "meta_info": {"completion_tokens": 3}}, "malformed"),
    ],
)
def test_a_rejection_counts_the_tokens_that_the_engine_sampled(content: Any, reason: str) -> None:
    with pytest.raises(GenerationRejected) as error_info:
        decode(content)
    assert error_info.value.reason == (reason or "logprobs_nonfinite")
    assert error_info.value.num_tokens == 3


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        "abc",
        {"output_ids": 3},
        {"output_ids": "abc", "meta_info": {"completion_tokens": "3"}},
        {"output_ids": None, "meta_info": {"completion_tokens": -3}},
        {"meta_info": {"completion_tokens": 10**9}},
    ],
)
def test_an_unreadable_or_impossible_count_is_zero(content: Any) -> None:
    with pytest.raises(GenerationRejected) as error_info:
        decode(content)
    assert error_info.value.num_tokens == 0


@pytest.mark.parametrize("content", [{}, [], {"error": "x"}, {"output_ids": "abc"}])
def test_other_json_is_malformed(content: Any) -> None:
    assert rejection(content) == "malformed"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_rejected(body: bytes) -> None:
    with pytest.raises(GenerationRejected):
        decode_generation(body, num_prompt_tokens=PROMPT)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-3, 13), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "version", "start", "end"]), st.integers(-3, 3), max_size=3
    ),
)


@st.composite
def corrupted_replies(draw: st.DrawFn) -> dict[str, Any]:
    """A consistent reply with junk in up to three places, at any depth."""
    content = reply(draw(st.integers(0, 3)), weight_versions=draw(st.none() | st.just([])))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or draw(st.booleans()):
                place[key] = draw(JUNK)
                break
            place = place[key]
    return content


@pytest.mark.slow
@settings(max_examples=2 * settings.default.max_examples)
@given(corrupted_replies())
def test_corrupted_reply_is_rejected_or_consistent(
    content: dict[str, Any],
) -> None:
    try:
        generation = decode(content)
    except GenerationRejected:
        return
    count = len(generation.output_ids)
    assert generation.output_ids.tolist() == content["output_ids"] and (
        (generation.output_ids >= 0).all()
    )
    assert generation.output_ids.max(initial=0) < 100
    values = [value for value, _, _ in content["meta_info"]["output_token_logprobs"]]
    assert generation.logprobs.tolist() == [np.float32(value) for value in values]
    assert (generation.logprobs <= 1e-3).all()
    assert generation.routes is None or generation.routes.shape == (
        PROMPT + count - 1,
        LAYERS,
        TOPK,
    )
    spans = generation.version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])] and spans[
        -1
    ].end == count
    assert all(span.start < span.end or count == 0 for span in spans)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_decoded_routes_equal_the_sent_ones(
    response: int, layers: int, topk: int, seed: int
) -> None:
    rows = PROMPT + response - 1
    routes = np.random.default_rng(seed).integers(0, 128, (rows, layers, topk)).astype("<i4")
    content = reply(response, routed_experts=base64.b64encode(routes.tobytes()).decode())
    assert np.array_equal(decode(content, (layers, topk)).routes, routes)


@pytest.mark.parametrize(
    ("last_expert", "dtype"),
    [(127, np.uint8), (255, np.uint8), (256, np.uint16), (299, np.uint16), (65535, np.uint16)],
)
def test_decoded_routes_take_the_smallest_type(last_expert: int, dtype: type) -> None:
    """A response may wait for a long time. The numbers of experts are 128 and 300."""
    routes = np.full((PROMPT + 1, LAYERS, TOPK), last_expert, "<i4")
    routes[..., 1] = 0
    content = reply(routed_experts=base64.b64encode(routes.tobytes()).decode())
    decoded_routes = decode(content).routes
    assert decoded_routes is not None and decoded_routes.dtype == dtype
    assert np.array_equal(decoded_routes, routes)


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4"])
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_routes_of_the_plugin_say_how_many_bytes_an_expert_has(
    dtype: str, response: int, layers: int, topk: int, seed: int
) -> None:
    rows = PROMPT + response - 1
    routes = np.random.default_rng(seed).integers(0, 256, (rows, layers, topk), np.int32)
    if dtype != "u1":
        routes[-1, -1, -1] = 256  # otherwise the plugin would send one byte
    sent = routes if dtype == "<i4" else narrow(routes)
    assert sent.nbytes == routes.size * np.dtype(dtype).itemsize + (dtype != "<i4")
    content = reply(response, routed_experts=base64.b64encode(sent.tobytes()).decode())
    decoded_routes = decode(content, (layers, topk)).routes
    assert decoded_routes is not None
    assert decoded_routes.dtype == (np.uint8 if dtype == "u1" else np.uint16)
    assert np.array_equal(decoded_routes, routes)


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("largest", [1, 255, 256, 65535])
@pytest.mark.parametrize("divisor", [2, 4])
def test_the_first_part_of_wide_routes_is_no_narrow_reply(
    topk: int, largest: int, divisor: int
) -> None:
    """With one expert a token, nothing else tells that the first quarter is none."""
    routes = np.random.default_rng(0).integers(0, largest + 1, (PROMPT + 1, 4, topk), np.int32)
    routes[0] = largest
    data = routes.tobytes()
    length = len(data) // divisor
    for end in (length, length + 1):
        content = reply(routed_experts=base64.b64encode(data[:end]).decode())
        assert rejection(content, shape=(4, topk)) == "routes_length"


@pytest.mark.parametrize("expert", [-1, -(2**31), 2**31 - 1, 65536])
def test_numbers_that_are_no_experts_stay_as_they_are(expert: int) -> None:
    routes = np.zeros((PROMPT + 1, LAYERS, TOPK), "<i4")
    routes[0, 0, 0] = expert
    content = reply(routed_experts=base64.b64encode(routes.tobytes()).decode())
    assert np.array_equal(decode(content).routes, routes)  # type: ignore[arg-type]
