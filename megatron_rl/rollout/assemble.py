"""An engine's reply as a `Rollout`.

Invariant: a rollout has one prompt segment and one response segment per weight version, and route rows that match its
inputs exactly; a reply from which that cannot be built is rejected by name.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.contracts import FinishReason, Prompt, Role, Rollout, Segment
from megatron_rl.rollout.messages import RouteShape
from megatron_rl.rollout.routes import validate_routes
from sglang_bridge.generation import Generation


class SampleRejected(ValueError):
    """A reply that cannot become a rollout; `reason` is a short name that metrics count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def assemble_rollout(
    prompt: Prompt,
    generation: Generation,
    *,
    trajectory_id: str,
    sample_index: int,
    routes: RouteShape | None,
    train_truncated: bool,
) -> Rollout:
    """Build the rollout of a single-turn reply. Raises `SampleRejected` or `RouteError`."""
    num_prompt, num_response = len(prompt.token_ids), len(generation.output_ids)
    if num_response == 0:
        raise SampleRejected("empty", f"sample {trajectory_id}: the engine returned no token")
    if not np.isfinite(generation.logprobs).all():
        raise SampleRejected("logprobs_nonfinite", f"sample {trajectory_id}: log-probabilities are not finite")
    finish = FinishReason(generation.finish_reason)
    if finish is FinishReason.ABORT:
        raise SampleRejected("aborted", f"sample {trajectory_id}: the engine aborted it")
    num_inputs = num_prompt + num_response - 1
    rows = None
    if routes is not None:
        if generation.routes is None:
            raise SampleRejected("routes_missing", f"sample {trajectory_id}: the engine recorded no routes")
        rows = validate_routes(
            generation.routes,
            num_inputs=num_inputs,
            moe_layers=routes.moe_layers,
            num_experts=routes.num_experts,
            topk=routes.topk,
        )
    prompt_segment = Segment(
        np.asarray(prompt.token_ids, np.int32), Role.PROMPT, False, None, (0, num_prompt), _versions(generation)[0]
    )
    response_segment = Segment(
        generation.output_ids,
        Role.RESPONSE,
        train_truncated or finish is FinishReason.STOP,
        generation.logprobs,
        (num_prompt, num_inputs),
        _versions(generation)[0],
    )
    return Rollout(trajectory_id, prompt.id, sample_index, finish, (prompt_segment, response_segment), rows)


def _versions(generation: Generation) -> tuple[int, ...]:
    try:
        return tuple(int(version) for version in generation.weight_versions)
    except ValueError as error:
        raise SampleRejected("version", f"weight versions {generation.weight_versions} are not integers") from error
