"""Requests for generations, encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One response to be sampled.

    name: unique among the engine's requests.
    first_route_row: routes of earlier inputs are not requested. seed: for CPU engines and for
    engines with `--enable-deterministic-inference`. Others ignore it.
    """

    name: str
    input_ids: Sequence[int]
    sampling: Sampling
    return_routes: bool = True
    seed: int | None = None
    first_route_row: int = 0

    @property
    def max_route_rows(self) -> int:
        """The largest number of rows of routes in the reply."""
        if not self.return_routes:
            return 0
        return len(self.input_ids) + self.sampling.max_new_tokens - self.first_route_row


def encode_request(*requests: GenerateRequest) -> bytes:
    """Encode the body of a `/generate` request for one or more responses.

    Several must have the same `return_routes` and `first_route_row`. The engine answers them in a
    stream: the first token of each, and each response as soon as it is complete.

    They are sampled without top-k and penalties. With top_p=1 the distribution is not truncated.
    """
    first = requests[0]
    body: dict[str, Any] = {
        "return_logprob": True,
        "return_routed_experts": first.return_routes,
    }
    if first.return_routes and first.first_route_row:
        body["routed_experts_start_len"] = first.first_route_row
    if len(requests) == 1:
        body |= {
            "rid": first.name,
            "input_ids": list(first.input_ids),
            "sampling_params": _sampling_parameters(first),
            "stream": False,
        }
    else:
        body |= {
            "rid": [request.name for request in requests],
            "input_ids": [list(request.input_ids) for request in requests],
            "sampling_params": [_streamed_parameters(request) for request in requests],
            "stream": True,
        }
    return msgspec.json.encode(body)


def _sampling_parameters(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    parameters: dict[str, Any] = {
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
    }
    if request.seed is not None:
        parameters["sampling_seed"] = request.seed
    return parameters


def _streamed_parameters(request: GenerateRequest) -> dict[str, Any]:
    """The parameters of a request whose reply is streamed.

    SGLang sends the first token at once, and nothing more before the end. So if it aborts a request
    that it has retracted, its reply has no other token.
    """
    return _sampling_parameters(request) | {"stream_interval": request.sampling.max_new_tokens}
