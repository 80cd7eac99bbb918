from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


def run_worker(world: int, checkpoint: Path, out: Path, *arguments: str) -> None:
    """Run parity_worker.py on `world` gloo processes; torchrun takes a free port."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(ROOT / "tests/mcore/parity_worker.py"), str(checkpoint), str(out), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def read(out: Path, kind: str) -> dict[str, torch.Tensor]:
    files = sorted(out.glob(f"{kind}-*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    run_worker(1, checkpoint, out)
    return out


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--ep", "2"), id="ep2"),
        pytest.param(("--ep", "2", "--recompute", "full"), id="ep2 recompute"),
        pytest.param((), id="dp2"),
        pytest.param(("--tp", "2", "--ep", "2", "--sequence-parallel"), id="tp2 sequence-parallel ep2"),
        pytest.param(("--pp", "2"), id="pp2"),
        pytest.param(("--pp", "2", "--vpp", "2"), id="pp2 vpp2"),
        pytest.param(("--pp", "2", "--vpp", "2", "--recompute", "full"), id="pp2 vpp2 recompute"),
    ],
)
def test_two_ranks_compute_what_one_computes(
    one_rank: Path, checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    run_worker(2, checkpoint, tmp_path, *arguments)
    original, exported = (_checkpoint(path) for path in (checkpoint, tmp_path / "export"))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    expected_losses, losses = read(one_rank, "losses"), read(tmp_path, "losses")
    assert losses.keys() == expected_losses.keys()
    for name, loss in expected_losses.items():
        torch.testing.assert_close(losses[name], loss, rtol=0, atol=1e-5)
    expected, gradients = read(one_rank, "gradients"), read(tmp_path, "gradients")
    assert gradients.keys() == expected.keys()
    errors = {n: float((gradients[n] - g).norm() / g.norm().clamp(min=1e-12)) for n, g in expected.items()}
    worst = max(errors, key=lambda n: errors[n])
    limit = 5e-6 if "--tp" in arguments else 1e-6  # tensor parallelism adds partial products in another order
    assert errors[worst] < limit, sorted(((round(e, 9), n) for n, e in errors.items()), reverse=True)[:6]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_one_rank_stops_the_step_on_all(checkpoint: Path, tmp_path: Path, rank: int) -> None:
    run_worker(2, checkpoint, tmp_path, "--ep", "2", "--poison-rank", str(rank))
    said = [(tmp_path / f"poison-{r}").read_text() for r in (0, 1)]
    assert said == ["stepped=False unchanged=True"] * 2


def _checkpoint(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, Any] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors
