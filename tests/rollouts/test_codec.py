"""Encoding of rollouts as bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollouts import codec
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


def test_routes_of_another_dtype_are_refused() -> None:
    with pytest.raises(codec.CodecError, match="float64"):
        codec.decode(codec.encode(make_rollout(2, 2, dtype=np.float64)))


def test_select_layers_keeps_the_named_rows_in_order() -> None:
    rollout = make_rollout(4, 4)
    assert rollout.routes is not None
    selection = codec.select_layers(rollout, (2, 0)).routes
    np.testing.assert_array_equal(selection, rollout.routes[:, [2, 0]])
    assert codec.select_layers(rollout, (0, 1, 2)) is rollout
