"""A real engine continues a response after each check as if nothing had stopped it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.wire.messages import FromCollector
from megatron_rl.rollouts.wire.repetition import RepetitionStop
from sglang_bridge.generation import Generation
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.support.configurations import configuration_of
from tests.support.engines import running_engine
from tests.support.exactness import EXACT
from tests.support.policies import COLUMN_ADDITION

NUM_PROMPTS = 24

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def stops(threshold: float | None) -> list[RepetitionStop | None]:
    """Return a stop for each response, which looks at it after every two tokens, or None."""
    return [
        None if threshold is None else RepetitionStop(threshold, ngram=1, every=2)
        for _ in range(NUM_PROMPTS)
    ]


async def sample(
    engine: ManagedEngine, prompts: Sequence[Prompt], stops: Sequence[RepetitionStop | None]
) -> list[Generation]:
    """Sample a response to each prompt."""
    shape = read_shape(str(COLUMN_ADDITION))
    routes = shape.route_shape

    async def ignore(message: FromCollector) -> None:
        """Drop a report."""

    form = RequestForm(
        api_key=engine.keys.api_key,
        longest_response=64,
        route_shape=(routes.num_hidden_layers, routes.topk),
        vocab_size=shape.vocab_size,
    )
    pool = EnginePool(EngineSettings(), form, ignore)
    await pool.set_engines([engine.engine])
    pool.set_version(0)
    sampling = Sampling(
        max_new_tokens=40, temperature=1.0, stop_token_ids=tuple(shape.eos_token_ids)
    )
    generations = await asyncio.gather(
        *(
            pool.generate(
                prompt.token_ids,
                sampling,
                rid=f"{prompt.id}#",
                return_routes=True,
                rejected_tokens=Counter(),
                seed=index,
                stop=stop,
            )
            for index, (prompt, stop) in enumerate(zip(prompts, stops, strict=True))
        )
    )
    await pool.close()
    return generations


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_checks_change_no_bit_and_a_low_threshold_stops_responses(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    settings = configuration_of(["experiment=quickstart"]).data
    tokenizer = Tokenizer.from_directory(str(COLUMN_ADDITION))
    prompts = open_prompts(settings, tokenizer).train[:NUM_PROMPTS]
    with running_engine(COLUMN_ADDITION, tmp_path, dtype=dtype) as engine:
        whole, same, short = (
            asyncio.run(sample(engine, prompts, stops(threshold)))
            for threshold in (None, 0.97, 0.3)
        )
    for response, other in zip(whole, same, strict=True):
        assert response.finish_reason is other.finish_reason
        assert np.array_equal(response.output_ids, other.output_ids)
        assert np.array_equal(response.logprobs, other.logprobs)
        assert response.routes is not None and other.routes is not None
        assert np.array_equal(response.routes, other.routes)
    cut = [
        pair
        for pair in zip(whole, short, strict=True)
        if len(pair[1].output_ids) < len(pair[0].output_ids)
    ]
    assert cut
    for response, other in cut:
        assert other.finish_reason is FinishReason.LENGTH
        assert np.array_equal(response.output_ids[: len(other.output_ids)], other.output_ids)
