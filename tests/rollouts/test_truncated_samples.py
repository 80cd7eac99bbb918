"""Truncated responses are trained on if rollout.train_truncated is true."""

import asyncio

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire.messages import FromCollector, GroupDone, GroupRequest
from tests.support.collectors import Outbox
from tests.support.fake_engine import Reply, configuration, fake_engine, reply, serving
from tests.support.scripted_model import EOS, PROMPT


def truncated_then_complete(n: int, body: Reply) -> Reply:
    return reply(body, "046", finish_reason={"type": "length" if n == 0 else "stop"})


@pytest.mark.parametrize("train_truncated", [True, False])
def test_a_truncated_response_is_trained_only_if_configured(train_truncated: bool) -> None:
    async def run() -> FromCollector:
        async with fake_engine(truncated_then_complete) as url:
            outbox = Outbox()
            rollout = RolloutSettings(max_new_tokens=16, train_truncated=train_truncated)
            collector = Collector(
                0, msgspec.structs.replace(configuration(), rollout=rollout), outbox.put
            )
            await collector.handle(serving(url))
            sampling = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
            await collector.handle(
                GroupRequest(group_id="g", prompt=PROMPT, num_samples=2, sampling=sampling)
            )
            message = await asyncio.wait_for(outbox.get(), 10)
            await collector.close()
            return message

    message = asyncio.run(run())
    assert isinstance(message, GroupDone)
    num_trainable = {ref.finish_reason: ref.num_trainable for ref in message.group.rollouts}
    assert num_trainable[FinishReason.STOP] > 0
    assert (num_trainable[FinishReason.LENGTH] > 0) == train_truncated
