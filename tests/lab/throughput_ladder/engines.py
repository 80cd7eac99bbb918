"""The engines of a measurement, whose responses have forced lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest

from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.collector.engines.engine_pool import RequestForm
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys
from sglang_bridge.plugin import narrow_routes
from tests.lab.throughput_ladder.workload import Workload, encode_to_the_end
from tests.support.engines import running_engine
from tests.support.policies import TWO_DIGIT_ADDITION


@dataclass(frozen=True)
class Engines:
    """The same engines with and without the plugin for routes."""

    narrow: Sequence[Engine]
    wide: Sequence[Engine]


def start_engines(
    stack: contextlib.ExitStack,
    logs: Path,
    keys: RunKeys,
    *,
    count: int,
    max_running: int,
    dtype: Literal["float32", "bfloat16"],
    narrow: bool = True,
) -> list[Engine]:
    """Start engines that end with `stack`. narrow: with the plugin for routes.

    Raises SystemExit if the plugin runs where it should not, or does not where it should.
    """
    engines: list[Engine] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(narrow_routes.VARIABLE, "1" if narrow else "0")
        for index in range(count):
            folder = logs / f"{'narrow' if narrow else 'wide'}-{index}"
            folder.mkdir()
            engine = running_engine(
                TWO_DIGIT_ADDITION, folder, max_running_requests=max_running, dtype=dtype, keys=keys
            )
            server = stack.enter_context(engine)
            if server.admin().narrows_routes() != narrow:
                raise SystemExit(
                    f"{server.url}: the plugin narrow_routes does not run there, so that no "
                    "rung has narrow routes. Run make install, and leave SGLANG_PLUGINS out"
                )
            engines.append(server.engine)
    return engines


def request_form(workload: Workload, keys: RunKeys) -> RequestForm:
    """Return what all requests share."""
    shape = read_shape(TWO_DIGIT_ADDITION)
    return RequestForm(
        api_key=keys.api_key,
        longest_response=workload.cap,
        route_shape=(shape.num_layers, shape.route_shape.topk),
        vocab_size=shape.vocab_size,
    )


@contextlib.contextmanager
def force_lengths() -> Iterator[None]:
    """Let every request of this process end at `max_new_tokens` alone."""
    with patch("sglang_bridge.post.encode_request", encode_to_the_end):
        yield
