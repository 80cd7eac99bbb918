"""Encoding of rollouts as bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollouts.wire import codec
from tests.support.rollouts import assert_equal, make_rollout


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([np.uint8, np.uint16]))
def test_round_trip(num_prompt: int, num_response: int, dtype: type) -> None:
    rollout = make_rollout(num_prompt, num_response, dtype=dtype)
    rollout_read = codec.decode(codec.encode(rollout))
    assert_equal(rollout_read, rollout)
    assert rollout_read.routes is not None and rollout_read.routes.dtype == dtype


@given(st.integers(0, 400), st.binary(max_size=3))
def test_a_damaged_buffer_raises_a_codec_error(cut: int, junk: bytes) -> None:
    data = codec.encode(make_rollout(5, 9))
    cut %= len(data)
    with pytest.raises(codec.CodecError):
        codec.decode(data[: min(cut, len(data) - 8)])
    with pytest.raises(codec.CodecError):
        codec.decode(junk + b"\x00" + data)


def test_tokens_and_logprobs_are_stored_with_32_bits() -> None:
    rollout = make_rollout(3, 4)
    segments = tuple(
        replace(
            segment,
            tokens=segment.tokens.astype(np.int64),
            logprobs=None if segment.logprobs is None else segment.logprobs.astype(np.float64),
        )
        for segment in rollout.segments
    )
    wide_rollout = replace(rollout, segments=segments)
    assert codec.encode(wide_rollout) == codec.encode(rollout)


def test_a_rollout_without_routes_stays_without_them() -> None:
    rollout = replace(make_rollout(3, 4), routes=None)
    rollout_read = codec.decode(codec.encode(rollout))
    assert rollout_read.routes is None
    assert rollout_read.segments[1].logprobs is not None
    assert codec.select_layers(rollout, (1,)) is rollout


def test_arrays_begin_at_multiples_of_eight_bytes() -> None:
    """Shared memory is read in place, and the routes come last."""
    for num_response in range(1, 9):
        rollout = make_rollout(3, num_response, dtype=np.uint16)
        data = codec.encode(rollout)
        assert len(data) % 8 == 0
        routes = rollout.routes
        assert routes is not None
        start = len(data) - (routes.nbytes + -routes.nbytes % 8)
        assert start % 8 == 0
        assert data[start : start + routes.nbytes] == routes.tobytes()


def test_routes_of_another_dtype_are_refused() -> None:
    with pytest.raises(codec.CodecError, match="float64"):
        codec.decode(codec.encode(make_rollout(2, 2, dtype=np.float64)))


def test_select_layers_keeps_the_named_rows_in_order() -> None:
    rollout = make_rollout(4, 4)
    assert rollout.routes is not None
    selection = codec.select_layers(rollout, (2, 0)).routes
    np.testing.assert_array_equal(selection, rollout.routes[:, [2, 0]])
    assert codec.select_layers(rollout, (0, 1, 2)) is rollout
