"""A response that was interrupted, against one that was not, from a real engine."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.wire.messages import FromCollector
from sglang_bridge.generation import Generation
from tests.sglang_bridge.tiny_model import LAYERS, TOP_K, write_tiny_model
from tests.support.engines import interrupt, running_engine
from tests.support.exactness import EXACT

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

SAMPLING = Sampling(max_new_tokens=300, temperature=1.0)
NUM_REQUESTS = 4
MAX_PIECES = 12


async def ignore(message: FromCollector) -> None:
    """Drop a report."""


async def generate(pool: EnginePool, pieces: Sequence[list[Generation]]) -> list[Generation]:
    """Sample a response for each list, which receives its pieces."""
    requests = [
        pool.generate(
            [4 + index, 5, 6],
            SAMPLING,
            rid=f"r{index}",
            return_routes=True,
            rejected_tokens=Counter(),
            seed=100 + index,
            pieces=parts,
        )
        for index, parts in enumerate(pieces)
    ]
    return await asyncio.gather(*requests)


def interrupted_pairs(
    model: Path, directory: Path, dtype: Literal["float32", "bfloat16"]
) -> tuple[list[tuple[Generation, Generation]], int]:
    """Return whole responses with their interrupted twins, and the number of their pieces."""
    num_pieces = 0
    with running_engine(model, directory, max_running_requests=8, dtype=dtype) as engine:
        form = RequestForm(
            api_key=engine.keys.api_key,
            longest_response=300,
            route_shape=(LAYERS, TOP_K),
            vocab_size=None,
        )

        async def run() -> list[tuple[Generation, Generation]]:
            nonlocal num_pieces
            pool = EnginePool(EngineSettings(), form, ignore)
            await pool.set_engines([engine.engine])
            whole = await generate(pool, [[] for _ in range(NUM_REQUESTS)])
            for _ in range(5):  # all responses may have ended before the first interruption
                pieces: list[list[Generation]] = [[] for _ in range(NUM_REQUESTS)]
                task = asyncio.create_task(generate(pool, pieces))
                for _ in range(MAX_PIECES):
                    await asyncio.sleep(0.1)
                    await interrupt(pool, engine)
                    pool.proceed()
                twins = await task
                num_pieces = sum(map(len, pieces))
                if num_pieces:
                    break
            await pool.close()
            return list(zip(whole, twins, strict=True))

        return asyncio.run(run()), num_pieces


@pytest.mark.skipif(
    not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_interrupted_response_equals_an_uninterrupted_one_bit_for_bit(
    dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model", seed=0)
    pairs, num_pieces = interrupted_pairs(model, tmp_path, dtype)
    assert num_pieces, "no response was interrupted"
    for whole, twin in pairs:
        assert twin.output_ids.tolist() == whole.output_ids.tolist()
        assert np.array_equal(twin.logprobs, whole.logprobs)
        assert whole.routes is not None and twin.routes is not None
        assert np.array_equal(twin.routes, whole.routes)
        assert twin.finish_reason is whole.finish_reason
        assert twin.version_spans == whole.version_spans
