"""Measure what it brings that groups wait on rank 0 until a node has room (late binding).

Start it in the root of the repository. Nothing else should use the cores:

    python -m tests.lab.throughput_ladder.binding

Two nodes have a collector and a real engine each. An engine runs on one core, which the other one
does not use: nodes do not lend each other their processors. They sample the responses of
`throughput_ladder`, with forced lengths, through the queue of rank 0. With early binding, every
group goes to a node as soon as it is requested, as `RolloutQueue.send_waiting` does it. Each seed
is a step with other prompts and lengths. In each round, each step is sampled in all ways, one after
the other, and in every other round in the opposite order.

Output: a Markdown table. `early / late` is how many times as long a step takes with early binding
as with late binding, in the same round with the same seed: the mean, and the half width of its
interval of 95 %. lengths: what is known of them beforehand. All ways sample the same tokens,
log-probabilities and routes, bit for bit, or the command ends with code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import GroupRequest
from megatron_rl.rollouts.wire.store import read_rollout
from sglang_bridge.keys import create_keys
from tests.lab.throughput_ladder import forced_collector
from tests.lab.throughput_ladder.arguments import add_spread, open_parser, parse
from tests.lab.throughput_ladder.workload import Workload
from tests.support.collector_processes import (
    collector_processes,
    configuration_for,
    engine_of_each_node,
    on_nodes,
)
from tests.support.intervals import interval
from tests.support.policies import TWO_DIGIT_ADDITION

NUM_NODES = 2
BINDINGS = ("early", "late")
LENGTHS = ("unknown", "by history")

# By knowledge of the lengths and by binding
Seconds = dict[tuple[str, str], list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    options = parse_arguments(arguments)
    keys = create_keys()
    workload = Workload(prompts=options.prompts, spread=options.spread)
    rollout = RolloutSettings(max_new_tokens=workload.cap, samples_per_prompt=workload.samples)
    os.environ[forced_collector.WORKLOAD] = f"{options.prompts} {options.spread}"
    hub = CollectorHub("127.0.0.1")
    seconds: Seconds = defaultdict(list)
    digests: dict[int, set[str]] = defaultdict(set)
    settings = configuration_for(
        TWO_DIGIT_ADDITION, keys, rollout, max_running_requests=options.max_running
    )
    with (
        tempfile.TemporaryDirectory() as logs,
        engine_of_each_node(
            NUM_NODES,
            TWO_DIGIT_ADDITION,
            Path(logs),
            keys,
            max_running_requests=options.max_running,
            has_core=True,
        ) as engines,
        collector_processes(hub, NUM_NODES, module=forced_collector.__name__),
    ):
        queue = RolloutQueue(hub, rollout)
        queue.configure(dict.fromkeys(range(NUM_NODES), settings))
        queue.set_engines(on_nodes(engines))
        queue.set_version(0)
        # The first round lets engines compile and fill their caches
        for round_index in range(options.rounds + 1):
            ways = list(product(range(options.seeds), LENGTHS, BINDINGS))
            for seed, lengths, binding in ways if round_index % 2 else reversed(ways):
                step_seconds, digest = run_step(
                    queue, workload, seed, is_late=binding == "late", is_known=lengths != "unknown"
                )
                digests[seed].add(digest)
                if round_index:
                    seconds[lengths, binding].append(step_seconds)
                    line = f"round {round_index}, seed {seed}, lengths {lengths}, {binding}: "
                    print(f"{line}{step_seconds:.2f} s", file=sys.stderr, flush=True)
        queue.stop()
    hub.close()
    if any(len(digests_of_seed) > 1 for digests_of_seed in digests.values()):
        print("the ways have sampled different responses", file=sys.stderr)
        return 1
    print("\n".join(table(seconds)))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = open_parser("python -m tests.lab.throughput_ladder.binding", __doc__)
    add_spread(parser)
    return parse(parser, arguments)


def run_step(
    queue: RolloutQueue, workload: Workload, seed: int, *, is_late: bool, is_known: bool
) -> tuple[float, str]:
    """Sample a step, and return its seconds and a digest of everything sampled."""
    sampling = Sampling(max_new_tokens=workload.cap, temperature=1.0)
    requests = [
        GroupRequest(
            group_id=f"{seed}-{response.prompt}",
            prompt=Prompt(
                id=str(response.prompt), token_ids=tuple(response.token_ids), answer="0", task="t"
            ),
            num_samples=workload.samples,
            sampling=sampling,
            step=1,
            expected_tokens=min(response.history, workload.cap) if is_known else 0,
        )
        for response in workload.responses(seed)
        if response.sample == 0
    ]
    start = time.monotonic()
    queue.submit(requests)
    if not is_late:
        queue.send_waiting()
    groups = list(queue.as_completed(lambda: None))
    seconds = time.monotonic() - start
    refs = [ref for group in groups for ref in group.rollouts]
    digest = hashlib.sha256()
    for ref in sorted(refs, key=lambda ref: ref.rollout_id):
        rollout = read_rollout(ref)
        response = rollout.segments[-1]
        assert rollout.routes is not None and response.logprobs is not None
        for array in (response.tokens, response.logprobs, rollout.routes):
            digest.update(array.tobytes())
    lengths = {f"{seed}-{r.prompt}/{r.sample}": r.length for r in workload.responses(seed)}
    assert {ref.rollout_id: ref.num_generated for ref in refs} == lengths
    queue.drop([group.group_id for group in groups])
    return seconds, digest.hexdigest()


def table(seconds: Seconds) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| lengths | early binding, s | late binding, s | early / late |"
    yield "|---|---|---|---|"
    for lengths in LENGTHS:
        early, late = (seconds[lengths, binding] for binding in BINDINGS)
        ratios = [before / after for before, after in zip(early, late, strict=True)]
        yield f"| {lengths} | {fmean(early):.2f} | {fmean(late):.2f} | {interval(ratios)} |"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
