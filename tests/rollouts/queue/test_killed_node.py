"""A node is killed while most requests wait on rank 0: every rollout arrives exactly once."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.wire.messages import GroupDone
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.support.collector_processes import engine_of_each_node, kill_tree, on_nodes
from tests.support.exactness import EXACT
from tests.support.node_steps import (
    MAX_RUNNING,
    PROMPTS,
    SAMPLES,
    Arrays,
    open_queue,
    read_arrays,
    rollout_settings,
)
from tests.support.scripted_model import CHECKPOINT, EOS
from tests.support.selectors import FixedPrompts

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(400)]

ANSWERS_BEFORE_THE_KILL = 5

Order = Literal["longest", "submission"]
Dtype = Literal["float32", "bfloat16"]


def sample(
    engines: Sequence[ManagedEngine], keys: RunKeys, order: Order, *, kills: bool
) -> tuple[RolloutBatch, Arrays, Counter[int]]:
    """Sample a step on two nodes. kills: kill node 1 after it has answered, while requests wait.

    Returns the batch, what its rollouts hold, and the number of answers by node. These are the
    answers until the kill, if there is one.
    """
    answers = Counter[int]()
    settings = rollout_settings(order)
    with open_queue(on_nodes(engines), keys, settings, num_nodes=2) as (queue, collectors):
        is_killed = False

        def kill_node_1(message: GroupDone, seconds: float) -> None:
            nonlocal is_killed
            if is_killed:
                return
            answers.update({rollout.location.node for rollout in message.group.rollouts})
            is_due = answers[1] and answers.total() >= ANSWERS_BEFORE_THE_KILL
            if kills and is_due:
                is_killed = True
                collectors[1].kill()
                kill_tree(engines[1].pid)

        def remove_killed_engine() -> None:
            if is_killed:
                queue.set_engines(on_nodes(engines[:1]))

        queue.on_arrival = kill_node_1
        sampler = RolloutSampler(
            queue, settings, FixedPrompts(PROMPTS, SAMPLES), (EOS,), remove_killed_engine
        )
        batch = sampler.sample(1)
        assert is_killed == kills
        return batch, read_arrays(batch), answers


@pytest.mark.skipif(not EXACT, reason="float32 sums depend on the batch without AVX-512")
@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        ("float32", "longest"),
        pytest.param("float32", "submission", marks=pytest.mark.nightly),
        pytest.param("bfloat16", "longest", marks=pytest.mark.nightly),
        pytest.param("bfloat16", "submission", marks=pytest.mark.nightly),
    ],
)
def test_no_rollout_is_lost_or_doubled_and_all_are_as_without_the_kill(
    tmp_path: Path, dtype: Dtype, order: Order
) -> None:
    keys = create_keys()
    with engine_of_each_node(
        2, CHECKPOINT, tmp_path, keys, max_running_requests=MAX_RUNNING, dtype=dtype
    ) as engines:
        reference, expected_arrays, answers = sample(engines, keys, order, kills=False)
        assert reference.num_repeated == 0
        assert min(answers[0], answers[1]) > ANSWERS_BEFORE_THE_KILL
        batch, arrays, answers = sample(engines, keys, order, kills=True)
    # A node runs two groups at a time, so that the others waited on rank 0 at the kill
    assert answers.total() + 2 * 2 <= len(PROMPTS) / 2
    assert batch.num_repeated >= answers[1] > 0
    assert arrays == expected_arrays
    assert batch.rejections == reference.rejections == Counter()
