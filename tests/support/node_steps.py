"""Steps that a queue samples on nodes of this machine, and what their rollouts hold."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.wire.store import read_rollout
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys
from tests.support.collector_processes import collector_processes, configuration_for
from tests.support.scripted_model import CHECKPOINT, TOKENIZER

PROMPTS = [
    Prompt(id=f"q{i}", token_ids=TOKENIZER.encode(f"{10 + i}+{90 - i}="), answer="100", task="t")
    for i in range(24)
]
SAMPLES = 4
MAX_RUNNING = 2  # so that most of the rollouts wait

# Tokens, log-probabilities and routes, by group id and sample index
Arrays = dict[tuple[str, int], tuple[bytes, bytes, bytes]]


def rollout_settings(order: Literal["longest", "submission"]) -> RolloutSettings:
    """Return settings with which most responses differ, and many are long."""
    return RolloutSettings(
        max_new_tokens=64, samples_per_prompt=SAMPLES, temperature=4.0, order=order
    )


@contextlib.contextmanager
def open_queue(
    engines: Sequence[Engine], keys: RunKeys, settings: RolloutSettings, *, num_nodes: int
) -> Iterator[tuple[RolloutQueue, list[subprocess.Popen[bytes]]]]:
    """Open a queue to these engines, and yield it with the collectors of the nodes.

    It expects more tokens of later prompts, so that the longest ones go in the opposite order.
    """
    hub = CollectorHub("127.0.0.1")
    with collector_processes(hub, num_nodes) as collectors:
        queue = RolloutQueue(hub, settings)
        queue.expected_tokens = lambda prompt: 1 + PROMPTS.index(prompt)
        configuration = configuration_for(
            CHECKPOINT, keys, settings, max_running_requests=MAX_RUNNING
        )
        queue.configure(dict.fromkeys(range(num_nodes), configuration))
        queue.set_engines(engines)
        queue.set_version(0)
        yield queue, collectors
        queue.stop()
    hub.close()


def read_arrays(batch: RolloutBatch) -> Arrays:
    """Read the rollouts of the batch of step 1, which has each one exactly once."""
    refs = [(group.group_id, ref) for group in batch.groups for ref in group.rollouts]
    assert Counter((group_id, ref.sample_index) for group_id, ref in refs) == Counter(
        (f"step-1-{prompt}", sample) for prompt in range(len(PROMPTS)) for sample in range(SAMPLES)
    )
    arrays = {}
    for group_id, ref in refs:
        rollout = read_rollout(ref)
        response = rollout.segments[-1]
        assert rollout.routes is not None and response.logprobs is not None
        parts = (response.tokens, response.logprobs, rollout.routes)
        tokens, logprobs, routes = (part.tobytes() for part in parts)
        arrays[group_id, ref.sample_index] = (tokens, logprobs, routes)
    return arrays


def digest_arrays(arrays: Arrays) -> str:
    """Return the SHA-256 of what rollouts hold."""
    digest = hashlib.sha256()
    for key, parts in sorted(arrays.items()):
        digest.update(repr((key, *map(len, parts))).encode())
        for part in parts:
            digest.update(part)
    return digest.hexdigest()
