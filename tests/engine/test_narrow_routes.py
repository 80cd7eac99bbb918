"""A real engine sends routes in a quarter of the bytes, and nothing else changes."""

import base64
import contextlib
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sglang_bridge.generation import decode_generation
from sglang_bridge.plugin.narrow_routes import VARIABLE
from sglang_bridge.request import GenerateRequest, Sampling, encode_request
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.sglang_bridge.tiny_model import LAYERS, TOP_K, write_tiny_model
from tests.support.engines import running_engine

pytestmark = pytest.mark.engine

PROMPTS = [[5, 6, 7, 8], list(range(20, 40)), [9]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ManagedEngine, ManagedEngine]]:
    """An engine with the plugin and one without it."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0)
    with contextlib.ExitStack() as stack:
        engines = []
        for value in ("1", "0"):
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv(VARIABLE, value)
            logs = tmp_path_factory.mktemp(f"plugin-{value}")
            engine = running_engine(model, logs, dtype=request.param)
            engines.append(stack.enter_context(engine))
        yield engines[0], engines[1]


def reply(engine: ManagedEngine, prompt: list[int]) -> bytes:
    """Sample a response of 12 tokens. The seed makes it the same in every engine."""
    sampling = Sampling(max_new_tokens=12, temperature=1.0)
    body = encode_request(
        GenerateRequest(name="sample", input_ids=prompt, sampling=sampling, seed=len(prompt))
    )
    headers = {
        "Authorization": f"Bearer {engine.keys.api_key}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(f"{engine.url}/generate", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def route_bytes(body: bytes) -> int:
    meta: dict[str, Any] = json.loads(body)["meta_info"]
    return len(base64.b64decode(meta["routed_experts"]))


def test_routes_take_a_quarter_of_the_bytes_and_one_byte_and_say_the_same(
    engines: tuple[ManagedEngine, ManagedEngine],
) -> None:
    on, off = engines
    assert on.admin().narrows_routes() is True
    assert off.admin().narrows_routes() is False
    for prompt in PROMPTS:
        narrow_body = reply(on, prompt)
        wide_body = reply(off, prompt)
        assert 4 * (route_bytes(narrow_body) - 1) == route_bytes(wide_body)
        narrow, wide = (
            decode_generation(body, num_prompt_tokens=len(prompt), route_shape=(LAYERS, TOP_K))
            for body in (narrow_body, wide_body)
        )
        assert narrow.output_ids.tolist() == wide.output_ids.tolist()
        assert narrow.logprobs.tobytes() == wide.logprobs.tobytes()
        assert narrow.routes is not None and wide.routes is not None
        assert np.array_equal(narrow.routes, wide.routes)
