"""What the setting for cut responses does on its way from the configuration to a sample."""

import asyncio

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rollouts.collector import Collector
from megatron_rl.rollouts.messages import FromCollector, GroupDone, GroupRequest
from tests.support.fake_engine import Reply, configuration, fake_engine, reply
from tests.support.scripted_model import EOS, PROMPT


def cut_then_whole(n: int, asked: Reply) -> Reply:
    return reply(asked, "046", finish_reason={"type": "length" if n == 0 else "stop"})


@pytest.mark.parametrize("train_truncated", [True, False])
def test_a_cut_sample_is_trained_only_if_the_run_says_so(train_truncated: bool) -> None:
    async def run() -> FromCollector:
        async with fake_engine(cut_then_whole) as url:
            outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
            rollout = RolloutSettings(max_new_tokens=16, train_truncated=train_truncated)
            collector = Collector(
                0, msgspec.structs.replace(configuration(url), rollout=rollout), outbox.put
            )
            sampling = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
            await collector.handle(
                GroupRequest(group_id="g", prompt=PROMPT, num_samples=2, sampling=sampling)
            )
            done = await asyncio.wait_for(outbox.get(), 10)
            await collector.close()
            return done

    done = asyncio.run(run())
    assert isinstance(done, GroupDone)
    trained = {ref.finish_reason: ref.num_trainable for ref in done.group.rollouts}
    assert trained[FinishReason.STOP] > 0
    assert (trained[FinishReason.LENGTH] > 0) == train_truncated
