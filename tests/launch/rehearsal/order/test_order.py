"""The order of a whole grid, rehearsed with real code. Each rank is a process."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from launch.rehearsal.order.check import check_order, programs_of_ranks
from launch.rehearsal.order.grid import Grid, Program, require_equal_groups
from launch.rehearsal.order.trace import Operation, Trace

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[4]
SETTINGS = (
    "experiment=smoke",
    "model.spec=local",
    "model.dtype=bfloat16",
    "engine=external",
    "engine.urls=[http://10.0.0.7:30000]",
)


def check(*arguments: str, plugins: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command. plugins: the folder of a user's own modules."""
    return subprocess.run(
        [sys.executable, "-m", "launch.rehearsal.order", *SETTINGS, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(plugins)},
        capture_output=True,
        text=True,
        check=False,
    )


def read_traces(folder: Path) -> list[Trace]:
    files = sorted(folder.glob("rank-*.trace"))
    return [msgspec.msgpack.decode(file.read_bytes(), type=Trace) for file in files]


def sequence(program: Program) -> list[Operation | int]:
    """The events of a rank, without the places of other ranks in them."""
    return [program.operations[event] if event >= 0 else event for event in program.events]


def test_representatives_give_the_sequences_of_all_ranks(tmp_path: Path) -> None:
    """Eight ranks of tp=2 pp=2 ep=2: four are representatives."""
    result = check(
        "ranks=8",
        "gpus_per_node=4",
        "every_rank=true",
        f"traces={tmp_path}",
        "parallel=tp2_pp2",
        "parallel.ep=2",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    traces = read_traces(tmp_path)
    assert [trace.rank for trace in traces] == list(range(8))
    grid = require_equal_groups(traces)
    few = [trace for trace in traces if trace.rank in grid.representatives().values()]
    assert len(few) == 4
    by_class = programs_of_ranks(grid, few)
    for rank, program in enumerate(programs_of_ranks(grid, traces)):
        for mine, other in zip(sequence(program), sequence(by_class[rank]), strict=True):
            assert in_grid(mine, rank, grid) == in_grid(other, rank, grid), rank
    assert check_order(few).operations == check_order(traces).operations


def in_grid(event: Operation | int, rank: int, grid: Grid) -> Operation | int:
    """An event with the rank's own group in place of its representative's."""
    if isinstance(event, int):
        return event
    group = grid.group_of(rank, event.group)
    return msgspec.structs.replace(event, group=group)


@pytest.mark.parametrize("parallel", ["pp2_vpp2", "cp2_ep2", "pp2_ep2"])
def test_other_grids_reach_their_ends(parallel: str) -> None:
    result = check("ranks=4", f"parallel={parallel}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every rank reaches its end" in result.stdout


def test_a_loss_that_talks_to_all_ranks_from_the_last_stage_is_named(tmp_path: Path) -> None:
    """Only the last stage computes a loss."""
    (tmp_path / "mine.py").write_text(
        "import torch.distributed as dist\n"
        "from megatron_rl.losses import LossResult\n"
        "class Loss:\n"
        "    def prepare(self, responses):\n"
        "        def objective(logprobs, denominators):\n"
        "            total = logprobs.detach().sum()\n"
        "            dist.all_reduce(total)\n"
        "            return LossResult(loss=-logprobs.sum(), sums={}, maxima={})\n"
        "        return objective\n"
    )
    settings = ("ranks=2", "parallel=pp2", "algo=custom", "algo.name=mine:Loss")
    result = check(*settings, plugins=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    fault = result.stdout.splitlines()[-1]
    assert fault.startswith("FAULT")
    assert "rank 1, phase 'step'" in fault and "allreduce of float32, 4 bytes" in fault
    assert "rank 0, phase 'step'" in fault and "in WORLD of 2 (0, 1)" in fault
