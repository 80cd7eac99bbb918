"""Runs the commands of a run on one rehearsed rank, and records what it exchanges.

Started as a process of its own for each rank:

    python -m launch.rehearsal.order.scenario RANK RANKS GPUS_PER_NODE MAIL OUT [SETTING ...]

MAIL: a file with what rank 0 receives from other ranks, or "-". OUT: the file for the `Trace`.
"""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launch.rehearsal.cuda_guard import load_cuda_guard
from launch.rehearsal.gpus import GPUS
from megatron_rl.contracts.exit_codes import Failure

# The order does not depend on the number of tokens. With these, every expert gets equally many.
PROMPT_TOKENS = 32
_GPU = GPUS["h100"]


def response_tokens(tp: int, cp: int, num_experts: int, topk: int) -> int:
    """The tokens of a response that let all experts get equally many rows on every rank."""
    rows = num_experts // math.gcd(num_experts, max(1, topk)) if num_experts else 1
    multiple = math.lcm(max(1, rows) * tp * cp, 2 * cp * tp)
    total = -(-2 * PROMPT_TOKENS // multiple) * multiple
    return total - PROMPT_TOKENS + 1  # the last token is no input


def record_rank(
    rank: int,
    world_size: int,
    gpus_per_node: int,
    mail: Mapping[str, list[bytes]],
    overrides: Sequence[str],
) -> Any:
    """Rehearse a rank and return its `Trace`."""
    load_cuda_guard()
    warnings.filterwarnings("ignore")  # Megatron names the libraries that this machine lacks
    from launch.rehearsal.order.trace import Recorder, install
    from launch.rehearsal.rank import Place, stand_in
    from megatron_rl.config.cli import compose
    from megatron_rl.contracts.launch_facts import LaunchFacts
    from megatron_rl.models.families import read_shape

    facts = LaunchFacts(
        world_size=world_size,
        local_world_size=min(world_size, gpus_per_node),
        num_gpus=gpus_per_node,
    )
    c = compose(overrides, facts=facts)
    shape = read_shape(c.model.path)
    tokens = response_tokens(c.parallel.tp, c.parallel.cp, shape.num_experts, shape.topk)
    small = (
        f"data.max_prompt_tokens={PROMPT_TOKENS}",
        f"rollout.max_new_tokens={tokens}",
        f"train.tokens_per_micro_batch={PROMPT_TOKENS + tokens - 1}",
    )
    c = compose([*overrides, *small], facts=facts)
    place = Place(rank, world_size, gpus_per_node, _GPU)
    recorder = Recorder(rank, world_size)
    recorder.mail = {name: list(messages) for name, messages in mail.items()}
    install(recorder)
    with stand_in(place, recorder) as (mode, _), tempfile.TemporaryDirectory() as folder:
        from launch.rehearsal.order.commands import RankCommands

        RankCommands(c, shape, place, mode, recorder, Path(folder)).run()
    return recorder.trace


def main(arguments: Sequence[str]) -> int:
    """Rehearse one rank and write its trace. Returns the exit code."""
    rank, world_size, gpus_per_node = map(int, arguments[:3])
    mail_file, out = arguments[3:5]
    mail: dict[str, list[bytes]] = {}
    if mail_file != "-":
        mail = msgspec.msgpack.decode(Path(mail_file).read_bytes(), type=dict[str, list[bytes]])
    try:
        trace = record_rank(rank, world_size, gpus_per_node, mail, arguments[5:])
    except Failure as failure:
        print(f"rank {rank}: {failure}", file=sys.stderr)
        return failure.exit_code
    Path(out).write_bytes(msgspec.msgpack.encode(trace))
    return 0


Handler = Callable[[Any], Any]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
