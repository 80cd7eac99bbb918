"""Runs the commands of a run on rehearsed ranks, each in a process of its own.

The modules that all ranks need are imported once. Every rank is a fork of that process.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

import msgspec

from launch.rehearsal.cuda_guard import load_cuda_guard
from launch.rehearsal.gpus import GPUS
from launch.rehearsal.order.trace import Trace
from megatron_rl.config.cli import compose
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape

Mail = Mapping[str, list[bytes]]

# The order does not depend on the number of tokens. With these, every expert gets equally many.
PROMPT_TOKENS = 32
_GPU = GPUS["h100"]


def response_tokens(tp: int, cp: int, num_experts: int, topk: int) -> int:
    """The tokens of a response that let all experts get equally many rows on every rank."""
    rows = num_experts // math.gcd(num_experts, max(1, topk)) if num_experts else 1
    multiple = math.lcm(max(1, rows) * tp * cp, 2 * cp * tp)
    total = -(-2 * PROMPT_TOKENS // multiple) * multiple
    return total - PROMPT_TOKENS + 1  # the last token is no input


class Scenario:
    """The commands of a run, for any of its ranks.

    facts: of the ranks' nodes. overrides: of the configuration. This process must not have imported
    torch before, and can rehearse no other scenario.
    """

    def __init__(self, facts: LaunchFacts, overrides: Sequence[str]) -> None:
        self._facts = facts
        c = compose(overrides, facts=facts)
        self._shape = read_shape(c.model.path)
        tokens = response_tokens(
            c.parallel.tp, c.parallel.cp, self._shape.num_experts, self._shape.topk
        )
        small = (
            f"data.max_prompt_tokens={PROMPT_TOKENS}",
            f"rollout.max_new_tokens={tokens}",
            f"train.tokens_per_micro_batch={PROMPT_TOKENS + tokens - 1}",
        )
        self._c = compose([*overrides, *small], facts=facts)
        _import_modules(facts.num_gpus)

    def start(self, rank: int, mail: Mail, out: Path, log: Path) -> ForkProcess:
        """Rehearse a rank in a process of its own, which writes its `Trace` and its errors.

        mail: what the rank receives from others, by phase.
        """
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self._main, args=(rank, mail, out, log), daemon=True)
        process.start()
        return process

    def _main(self, rank: int, mail: Mail, out: Path, log: Path) -> None:
        gc.freeze()  # the collector would copy the memory that ranks share
        with open(os.devnull, "w") as nowhere, log.open("w") as errors:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
            os.dup2(errors.fileno(), sys.stderr.fileno())
        try:
            trace = self._record(rank, mail)
        except Failure as failure:
            print(f"rank {rank}: {failure}", file=sys.stderr)
            sys.exit(failure.exit_code)
        out.write_bytes(msgspec.msgpack.encode(trace))

    def _record(self, rank: int, mail: Mail) -> Trace:
        from launch.rehearsal.order.commands import RankCommands
        from launch.rehearsal.order.recorder import Recorder, install
        from launch.rehearsal.rank import Place, stand_in

        facts = self._facts
        place = Place(rank, facts.world_size, facts.num_gpus, _GPU)
        recorder = Recorder(rank, facts.world_size)
        recorder.mail = {phase: list(messages) for phase, messages in mail.items()}
        install(recorder)
        with stand_in(place, recorder) as (mode, _), tempfile.TemporaryDirectory() as folder:
            RankCommands(self._c, self._shape, place, mode, recorder, Path(folder)).run()
        return recorder.trace


def _import_modules(gpus_per_node: int) -> None:
    """Import what all ranks need. Some modules look for a GPU when they are imported."""
    load_cuda_guard()
    warnings.filterwarnings("ignore")  # Megatron names the libraries that this machine lacks
    from launch.rehearsal.torch_stand_ins import stand_in_for_cuda
    from megatron_rl.mcore import compat

    stand_in_for_cuda(_GPU, gpus_per_node)
    compat.install()

    import torch._inductor.compile_fx  # noqa: F401, for torch.compile

    import launch.rehearsal.order.commands  # noqa: F401
