"""An engine's reply as a `Rollout`."""

from __future__ import annotations

import numpy as np

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.contracts.routes import validate_routes
from megatron_rl.rollouts.messages import RouteShape
from sglang_bridge.generation import Generation


class RolloutRejected(ValueError):
    """A reply that cannot become a rollout; `reason` is a short name that metrics count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def assemble_rollout(
    prompt: Prompt,
    generation: Generation,
    *,
    rollout_id: str,
    sample_index: int,
    routes: RouteShape | None,
    train_truncated: bool,
) -> Rollout:
    """Build the rollout of a single-turn reply. Raises `RolloutRejected` or `RouteError`."""
    num_prompt, num_response = len(prompt.token_ids), len(generation.output_ids)
    if num_response == 0:
        raise RolloutRejected("empty", f"sample {rollout_id}: the engine returned no token")
    finish = FinishReason(generation.finish_reason)
    if finish is FinishReason.ABORT:
        raise RolloutRejected("aborted", f"sample {rollout_id}: the engine aborted it")
    num_inputs = num_prompt + num_response - 1
    rows = None
    if routes is not None:
        if generation.routes is None:
            raise RolloutRejected("routes_missing", f"sample {rollout_id}: the engine recorded no routes")
        rows = validate_routes(
            generation.routes,
            num_inputs=num_inputs,
            moe_layers=routes.moe_layers,
            num_experts=routes.num_experts,
            topk=routes.topk,
        )
    response = [
        Segment(
            generation.output_ids[span.start : span.end],
            Role.RESPONSE,
            train_truncated or finish is FinishReason.STOP,
            generation.logprobs[span.start : span.end],
            (num_prompt + span.start, min(num_prompt + span.end, num_inputs)),
            _version(span.version, rollout_id),
        )
        for span in generation.version_spans
    ]
    # a retracted request is re-prefilled, so the prompt's routes are those of the last version it was drawn with
    prompt_version = response[-1].version if generation.retractions else response[0].version
    prompt_segment = Segment(
        np.asarray(prompt.token_ids, np.int32), Role.PROMPT, False, None, (0, num_prompt), prompt_version
    )
    return Rollout(rollout_id, prompt.id, sample_index, finish, (prompt_segment, *response), rows)


def _version(version: str, rollout_id: str) -> int:
    if not version.isdecimal():
        raise RolloutRejected(
            "version",
            f"sample {rollout_id}: weight version {version!r} is not a number: its weights were never synced",
        )
    return int(version)
