"""One request for a generation, encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of responses.

    Training requires the full distribution: no top-k or penalties, and top_p 1. Evaluations may
    sample from the most probable tokens whose probabilities add up to top_p.
    """

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0


def encode_request(
    input_ids: Sequence[int],
    sampling: Sampling,
    rid: str,
    return_routes: bool,
    seed: int | None,
    first_route_row: int = 0,
) -> bytes:
    """Encode the body of a `/generate` request.

    It samples without top-k and penalties. With top_p=1 the distribution is not truncated.

    first_route_row: routes of earlier inputs are not requested. seed: for CPU engines and for
    engines with `--enable-deterministic-inference`. Others ignore it.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(input_ids),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": False,
        },
        "return_logprob": True,
        "return_routed_experts": return_routes,
        "stream": False,
    }
    if return_routes and first_route_row:
        body["routed_experts_start_len"] = first_route_row
    if seed is not None:
        body["sampling_params"]["sampling_seed"] = seed
    return msgspec.json.encode(body)
