"""Measure the processor time of a response outside of the model, by process.

Start it in the root of the repository. Nothing else should use the cores:

    python -m tests.lab.response_cost

A real engine and a real collector sample groups of the quickstart's prompts. In each round, the
step is sampled twice, with the same seeds. Alone: with an HTTP request for each response, routes as
SGLang sends them, and at most 256 responses at once. Together: as experiment=quickstart samples it.

Output: a Markdown table of milliseconds for each response, mean and half width of the interval of
95 %, and of the ratio within a round. The engine's scheduler is without its forward passes, by
SGLang's own clock. If the responses differ, the command ends with code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import os
import re
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from megatron_rl.config.schema import (
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts import column_addition
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire.codec import encode
from megatron_rl.rollouts.wire.messages import Configure, Drop, GroupDone, GroupRequest, Serve
from megatron_rl.rollouts.wire.store import read_rollout
from sglang_bridge import client
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.plugin import narrow_routes
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.support.collectors import Outbox
from tests.support.engines import running_engine
from tests.support.intervals import interval
from tests.support.policies import COLUMN_ADDITION

SCHEDULER = "engine's scheduler"
HTTP = "engine's HTTP process"
COLLECTOR = "collector"
ALL = "all"
_FORWARD = re.compile(
    r'^sglang:scheduler_stage_seconds_total\{[^}]*category="run_batch"[^}]*\} (\S+)$', re.MULTILINE
)
_MAX_NEW_TOKENS = 32
# SGLang reports the seconds of its stages once a second
_SETTLE_SECONDS = 2.5

Seconds = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.response_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=6, help="at least 2; default: 6")
    parser.add_argument("--prompts", type=int, default=64, help="of a step; default: 64")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt; default: 8")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.prompts < 1 or options.samples < 1:
        parser.error("--rounds has to be at least 2, --prompts and --samples at least 1")
    keys = create_keys()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        wide = _start_engine(stack, Path(logs), keys, narrow="0", max_running_requests=256)
        narrow = _start_engine(stack, Path(logs), keys, narrow="1", max_running_requests=512)
        # The heap of this process is larger than a collector's
        gc.freeze()
        rounds = asyncio.run(_measure(wide, narrow, options))
    if any(first != second for *_, (first, second) in rounds):
        print("the two ways have sampled different responses", file=sys.stderr)
        return 1
    print("\n".join(table([before for before, *_ in rounds], [after for _, after, _ in rounds])))
    return 0


def table(before: Sequence[Seconds], after: Sequence[Seconds]) -> Iterator[str]:
    """Yield the lines of the table. before, after: seconds of a response by process, by round."""
    yield "| process | alone | together | ratio |"
    yield "|---|---|---|---|"
    for name in (SCHEDULER, HTTP, COLLECTOR, ALL):
        old, new = ([_seconds_of(name, step) * 1e3 for step in steps] for steps in (before, after))
        ratios = [after / before for before, after in zip(old, new, strict=True)]
        cells = " | ".join(interval(values) for values in (old, new, ratios))
        yield f"| {name} | {cells} |"


def _seconds_of(name: str, seconds: Mapping[str, float]) -> float:
    return sum(seconds.values()) if name == ALL else seconds[name]


def _start_engine(
    stack: contextlib.ExitStack,
    logs: Path,
    keys: RunKeys,
    *,
    narrow: str,
    max_running_requests: int,
) -> ManagedEngine:
    folder = logs / narrow
    folder.mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(narrow_routes.VARIABLE, narrow)
        engine = running_engine(
            COLUMN_ADDITION, folder, max_running_requests=max_running_requests, keys=keys
        )
        return stack.enter_context(engine)


async def _measure(
    wide: ManagedEngine, narrow: ManagedEngine, options: argparse.Namespace
) -> list[tuple[Seconds, Seconds, tuple[str, str]]]:
    rounds = []
    # The first round lets engines compile and fill their caches
    for number in range(options.rounds + 1):
        with patch.object(client, "MAX_REQUESTS_TOGETHER", 1):
            before, first_digest = await _sample(wide, options, number)
        after, second_digest = await _sample(narrow, options, number)
        if number:
            rounds.append((before, after, (first_digest, second_digest)))
    return rounds


async def _sample(
    engine: ManagedEngine, options: argparse.Namespace, number: int
) -> tuple[Seconds, str]:
    """Sample a step, and return the processor seconds of a response and a digest of all."""
    shape = read_shape(COLUMN_ADDITION)
    outbox = Outbox()
    configuration = Configure(
        api_key=engine.keys.api_key,
        model_path=str(COLUMN_ADDITION),
        routes=shape.route_shape,
        engine=EngineSettings(),
        rollout=RolloutSettings(max_new_tokens=_MAX_NEW_TOKENS),
        reward=RewardSettings(name="exact_match"),
        environment=EnvironmentSettings(),
        vocab_size=shape.vocab_size,
        seed=number,
    )
    collector = Collector(0, configuration, outbox.put)
    await collector.handle(Serve(number=1, engines=(engine.engine,), version=None))
    requests = [
        GroupRequest(
            group_id=prompt.id.rpartition("/")[2],
            prompt=prompt,
            num_samples=options.samples,
            sampling=Sampling(
                max_new_tokens=_MAX_NEW_TOKENS,
                temperature=1.0,
                stop_token_ids=tuple(shape.eos_token_ids),
            ),
            step=1,
        )
        for prompt in islice(_prompts(), options.prompts)
    ]
    start = _processor_seconds(engine)
    for request in requests:
        await collector.handle(request)
    groups: dict[str, Group] = {}
    while len(groups) < len(requests):
        message = await asyncio.wait_for(outbox.get(), 300)
        assert isinstance(message, GroupDone), message
        groups[message.group.group_id] = message.group
    await asyncio.sleep(_SETTLE_SECONDS)
    end = _processor_seconds(engine)
    digest = hashlib.sha256()
    for group_id in sorted(groups):
        for ref in groups[group_id].rollouts:
            digest.update(encode(read_rollout(ref)))
    await collector.handle(Drop(tuple(groups)))
    await collector.close()
    num_responses = options.prompts * options.samples
    seconds = {name: (end[name] - start[name]) / num_responses for name in start}
    return seconds, digest.hexdigest()


def _prompts() -> Iterator[Prompt]:
    tokenizer = Tokenizer.from_directory(COLUMN_ADDITION)
    for question in column_addition.questions(0):
        yield Prompt(
            id=question.id,
            token_ids=tuple(tokenizer.encode(question.text)),
            answer=question.answer,
            task=question.task,
        )


def _processor_seconds(engine: ManagedEngine) -> Seconds:
    """The processor seconds so far, by process. The scheduler is without its forward passes."""
    seconds: Seconds = defaultdict(float)
    for process in psutil.Process(engine.pid).children(recursive=True):
        name = SCHEDULER if "scheduler" in process.cmdline()[0] else HTTP
        times = process.cpu_times()
        seconds[name] += times.user + times.system
    own_times = psutil.Process().cpu_times()
    seconds[COLLECTOR] = own_times.user + own_times.system
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    forward_seconds = [float(match[1]) for match in _FORWARD.finditer(text)]
    if not forward_seconds:
        raise SystemExit(f"{engine.url}/metrics: SGLang reports no seconds of its forward passes")
    seconds[SCHEDULER] -= sum(forward_seconds)
    return dict(seconds)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
