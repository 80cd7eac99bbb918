"""A collector whose responses have the lengths of a workload.

The environment variable `WORKLOAD` holds the number of prompts and the spread. The ids of groups
are SEED-PROMPT.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from unittest.mock import patch

import msgspec

from megatron_rl.rollouts.collector.__main__ import main
from sglang_bridge.request import GenerateRequest
from tests.lab.throughput_ladder.workload import Workload, encode_to_the_end

WORKLOAD = "LADDER_WORKLOAD"


@functools.cache
def lengths_of(seed: int) -> dict[str, int]:
    """Return the lengths of a step's responses, by their names."""
    prompts, spread = os.environ[WORKLOAD].split()
    workload = Workload(prompts=int(prompts), spread=float(spread))
    return {response.name: response.length for response in workload.responses(seed)}


def with_length(request: GenerateRequest) -> GenerateRequest:
    """Return a request for as many tokens as its response is to have."""
    seed, _, name = request.name.partition("#")[0].partition("-")
    length = lengths_of(int(seed))[name]
    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=length)
    return dataclasses.replace(request, sampling=sampling)


def encode(*requests: GenerateRequest) -> bytes:
    """Encode requests that end at the lengths of their responses alone."""
    return encode_to_the_end(*map(with_length, requests))


if __name__ == "__main__":
    with patch("sglang_bridge.post.encode_request", encode):
        sys.exit(main(sys.argv[1:]))
