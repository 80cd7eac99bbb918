"""Valid rollouts with artificial contents."""

import numpy as np

from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment

VERSION = 5  # weight version of the responses of `make_rollout`


def make_rollout(
    num_prompt: int, num_response: int, *, layers: int = 3, topk: int = 2, dtype: type = np.uint8
) -> Rollout:
    rng = np.random.default_rng(num_prompt * 100 + num_response)
    inputs = num_prompt + num_response - 1
    return Rollout(
        rollout_id="g7/3",
        prompt_id="p-é",
        sample_index=3,
        finish_reason=FinishReason.STOP,
        segments=(
            Segment(
                rng.integers(0, 48, num_prompt).astype(np.int32),
                Role.PROMPT,
                False,
                None,
                (0, num_prompt),
                4,
            ),
            Segment(
                rng.integers(0, 48, num_response).astype(np.int32),
                Role.RESPONSE,
                True,
                rng.normal(size=num_response).astype(np.float32),
                (num_prompt, inputs),
                VERSION,
            ),
        ),
        routes=rng.integers(0, 8, (inputs, layers, topk)).astype(dtype),
    )


def assert_equal(left: Rollout, right: Rollout) -> None:
    assert (left.rollout_id, left.prompt_id, left.sample_index) == (
        right.rollout_id,
        right.prompt_id,
        right.sample_index,
    )
    assert left.finish_reason is right.finish_reason
    for a, b in zip(left.segments, right.segments, strict=True):
        assert (a.role, a.trainable, a.route_rows, a.version) == (
            b.role,
            b.trainable,
            b.route_rows,
            b.version,
        )
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None and b.logprobs is not None:
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
    np.testing.assert_array_equal(left.routes, right.routes)
