"""Checkpoints resume exactly in the layout that saved them, and in every other one.

Each is also exported from each layout. `DAILY` has each kind of resume once, and the others are
marked `nightly`.
"""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.models.families import read_shape
from tests.support.batches import make_batch
from tests.support.float64_model import write_checkpoint
from tests.support.layouts import BATCH, BATCHES, MODELS, STEPS_PER_BATCH
from tests.support.packed_sequences import sequence
from tests.support.recordings import write_rollouts
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("checkpoint_layouts.py")
LAYOUTS = ("ep2-none", "dp2-none", "tp2-none", "pp2_vpp2-none", "cp2-none")
# (saved, loaded): every layout is saved and loaded in another one. dp2 has no expert parallelism.
PAIRS = (
    ("ep2-none", "dp2-none"),
    ("dp2-none", "ep2-none"),
    ("pp2_vpp2-none", "ep2-none"),
    ("tp2-none", "cp2-none"),
    ("cp2-none", "pp2_vpp2-none"),
    ("ep2-none", "tp2-none"),
)
BFLOAT16_LAYOUTS = ("tp2_ep2-bfloat16", "pp2_vpp2-bfloat16", "cp2_ep2-bfloat16")
BFLOAT16_PAIRS = (
    ("tp2_ep2-bfloat16", "cp2_ep2-bfloat16"),
    ("pp2_vpp2-bfloat16", "tp2_ep2-bfloat16"),
    ("cp2_ep2-bfloat16", "pp2_vpp2-bfloat16"),
)
BFLOAT16 = [*((layout, layout) for layout in BFLOAT16_LAYOUTS), *BFLOAT16_PAIRS]
ALL = [*((layout, layout) for layout in LAYOUTS), *PAIRS, *BFLOAT16]
# test_exact_resume.py resumes a bfloat16 run in the same layout
DAILY = [
    ("ep2-none", "ep2-none"),
    ("pp2_vpp2-none", "ep2-none"),
    ("tp2_ep2-bfloat16", "cp2_ep2-bfloat16"),
]
NIGHTLY = [pair for pair in ALL if pair not in DAILY]
DAILY_EXPORTS = [saved_layout for saved_layout, _ in DAILY]
SEQUENCES = range(8)  # the job computed the logits of these
# The largest difference of metrics and weights between layouts, which add in different orders. A
# lost moment would change weights by 1e-3.
TOLERANCE = 2e-6
# The largest mean difference of bfloat16 matrices. Sums in other orders change some weights by one
# step of bfloat16. The batch itself moves the weights by 5e-4 on average.
BFLOAT16_TOLERANCE = 1.5e-4

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def run_job(directory: Path, pairs: Iterable[tuple[str, str]]) -> Path:
    """Save and load every pair of layouts in one job. Returns the directory of the results."""
    write_checkpoint(directory / "plain", **MODELS["plain"])
    _, rollouts, _ = make_batch(read_shape(directory / "plain"), BATCHES * BATCH)
    write_rollouts(directory / "rollouts", rollouts)
    torchrun(SCRIPT, str(directory), *map(":".join, pairs), ranks=2, timeout=800)
    return directory


FindResults = Callable[[bool], Path]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> FindResults:
    """Return the results of the daily pairs of layouts, or those of all others."""

    @cache
    def find(is_daily: bool) -> Path:
        return run_job(tmp_path_factory.mktemp("layouts"), DAILY if is_daily else NIGHTLY)

    return find


def params(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    """The parameters of pairs of layouts."""
    return [
        pytest.param(*pair, marks=() if pair in DAILY else pytest.mark.nightly) for pair in pairs
    ]


def read(directory: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(directory / f"{name}.pt", weights_only=True)
    return result


@pytest.mark.parametrize(
    ("saved_layout", "layout"), params(pair for pair in ALL if pair[0] == pair[1])
)
def test_resume_in_the_same_layout_is_bit_exact(
    results: FindResults, saved_layout: str, layout: str
) -> None:
    directory = results((saved_layout, layout) in DAILY)
    baseline = read(directory, f"{saved_layout}:")
    resume = read(directory, f"{saved_layout}:{layout}")
    assert resume["metrics"] == baseline["metrics"]
    assert resume["adam_steps"] == baseline["adam_steps"] == [2 * STEPS_PER_BATCH]
    assert different_weights(baseline["weights"], resume["weights"]) == []


@pytest.mark.parametrize(("saved_layout", "layout"), params(BFLOAT16_PAIRS))
def test_resume_in_another_bfloat16_layout_keeps_model_and_optimizer(
    results: FindResults, saved_layout: str, layout: str
) -> None:
    """The weights are equal after loading, and close after another bfloat16 batch."""
    directory = results((saved_layout, layout) in DAILY)
    saved_weights = read(directory, f"{saved_layout}-model")["weights"]
    weights = read(directory, f"{saved_layout}:{layout}-loaded")["weights"]
    assert different_weights(saved_weights, weights) == []
    baseline = read(directory, f"{saved_layout}:")["weights"]
    resume = read(directory, f"{saved_layout}:{layout}")["weights"]
    matrices = {name: weight for name, weight in baseline.items() if weight.ndim > 1}
    for name, weight in matrices.items():
        difference = float((weight.float() - resume[name].float()).abs().mean())
        assert difference < BFLOAT16_TOLERANCE, name


def different_weights(
    baseline: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> list[str]:
    assert baseline.keys() == weights.keys()
    return [name for name, weight in baseline.items() if not weight.equal(weights[name])]


@pytest.mark.parametrize(("saved_layout", "layout"), params(PAIRS))
def test_resume_in_another_layout_keeps_model_and_optimizer(
    results: FindResults, saved_layout: str, layout: str
) -> None:
    directory = results((saved_layout, layout) in DAILY)
    baseline = read(directory, f"{saved_layout}:")
    resume = read(directory, f"{saved_layout}:{layout}")
    for name in ("train/loss", "policy/entropy", "train/grad_norm"):
        metric = pytest.approx(baseline["metrics"][name], abs=TOLERANCE)
        assert resume["metrics"][name] == metric, name
    for name, weight in baseline["weights"].items():
        assert float((weight - resume["weights"][name]).abs().max()) < TOLERANCE, name


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout in DAILY_EXPORTS else pytest.mark.nightly)
        for layout in (*LAYOUTS, *BFLOAT16_LAYOUTS)
    ],
)
def test_export_of_a_checkpoint_is_bit_exact(results: FindResults, layout: str) -> None:
    directory = results(layout in DAILY_EXPORTS)
    weights = read(directory, f"{layout}-model")["weights"]
    export = {
        name: tensor
        for file in (directory / f"exported-{layout}").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert different_weights({n: w.float() for n, w in weights.items()}, export) == []


def test_logits_of_an_export_match_the_trainer(results: FindResults) -> None:
    from transformers import AutoModelForCausalLM

    directory = results(True)
    trainer_logits = read(directory, "ep2-none-model")["logits"]
    hf_model = AutoModelForCausalLM.from_pretrained(directory / "exported-ep2-none").float().eval()
    with torch.no_grad():
        logits = torch.cat([hf_model(input_ids=sequence(i)[None]).logits[0] for i in SEQUENCES])
    assert trainer_logits.abs().max() > 0.5
    torch.testing.assert_close(logits, trainer_logits, rtol=0, atol=2e-5)


UNREADABLE_ON_RANK_1 = """
import sys
from pathlib import Path
from megatron_rl.mcore import compat
compat.install()
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors
from megatron_rl.mcore.optimizer import DistributedAdam
from tests.support.policies import ADAM, TWO_DIGIT_ADDITION, make_policy

grid = ParallelSettings(ep=2, timeout_s=60)
layout = parallel.initialize(grid, seed=0)
models = make_policy(TWO_DIGIT_ADDITION, grid, GrpoSettings())[1].models
optimizer = DistributedAdam(models, ADAM, total_steps=9)
directory = Path(sys.argv[1])
write_tensors(gather_tensors(models, optimizer), directory, layout.control_group)

def fail(*_):
    raise OSError("this disk is gone")

if layout.rank == 1:
    FileSystemReader.read_data = fail
dist.barrier()
try:
    group = layout.control_group
    load_tensors(models, optimizer, directory, optimizer_steps=0, group=group)
except ValueError as error:
    print(layout.rank, error, flush=True)
parallel.shutdown()
"""


def test_every_rank_learns_that_one_cannot_read(tmp_path: Path) -> None:
    script = tmp_path / "unreadable.py"
    script.write_text(UNREADABLE_ON_RANK_1)
    (tmp_path / "checkpoint").mkdir()
    output = torchrun(script, str(tmp_path / "checkpoint"), ranks=2)
    for rank in (0, 1):
        assert f"{rank} this disk is gone" in output
