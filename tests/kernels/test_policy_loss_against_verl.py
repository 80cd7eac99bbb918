"""Special cases of ESPO against verl's functions, to 1e-8 in float64. `make peers` installs verl.

verl divides a sequence's sum by its tokens plus 1e-8, hence the tolerance. Its dual clip (a ratio
above 3 with a negative advantage) is not part of PPO-clip. The drift here stays below it.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.batches import ResponseBatch, response_batch
from tests.kernels.processes import ROOT, importable
from tests.kernels.special_cases import one_group_per_sequence, one_group_per_token, pad_tokens

PEERS = Path(sys.prefix) / "peers"
INSTALLED = (PEERS / "verl").is_dir() or importlib.util.find_spec("verl") is not None
CLIPS = {"gspo": 0.05, "vanilla": 0.2}
LENGTHS = [[1, 7, 40], [5], [1, 1, 1, 2], [33, 2, 0, 18, 64, 9], [12, 12, 12, 12]]


def verl_results(
    batches: dict[str, dict[str, object]], directory: Path
) -> dict[str, dict[str, torch.Tensor]]:
    torch.save(batches, directory / "batches.pt")
    script = Path(__file__).with_name("verl_losses.py")
    environment = importable(PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] += f":{PEERS}"
    process = subprocess.run(
        [sys.executable, str(script), str(directory / "batches.pt"), str(directory / "out.pt")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return torch.load(directory / "out.pt", weights_only=True)


def verl_batch(objective: str, lengths: list[int], batch: ResponseBatch) -> dict[str, object]:
    return {
        "logprobs": pad_tokens(batch.logprobs, lengths),
        "old_logprobs": pad_tokens(batch.old_logprobs, lengths),
        "advantages": pad_tokens(batch.advantages, lengths),
        "mask": pad_tokens(batch.loss_mask.double(), lengths),
        "clip": CLIPS[objective],
        "objective": objective,
    }


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="verl is not installed: make peers")
@pytest.mark.timeout(300)
def test_special_cases_equal_verl(tmp_path: Path) -> None:
    cases = {
        f"{objective} {i} {seed}": (objective, lengths, response_batch(lengths, seed, drift=0.3))
        for objective in ("gspo", "vanilla")
        for i, lengths in enumerate(LENGTHS)
        for seed in range(4)
    }
    reference = verl_results(
        {
            name: verl_batch(objective, lengths, batch)
            for name, (objective, lengths, batch) in cases.items()
            if batch.loss_mask.any()
        },
        tmp_path,
    )
    assert len(reference) > 30
    ours = {"gspo": one_group_per_sequence, "vanilla": one_group_per_token}
    for name, result in reference.items():
        objective, lengths, batch = cases[name]
        loss, gradient = ours[objective](batch, lengths, CLIPS[objective])
        torch.testing.assert_close(
            loss, result["loss"], rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )
        torch.testing.assert_close(
            pad_tokens(gradient, lengths),
            result["gradient"],
            rtol=1e-8,
            atol=1e-8,
            msg=lambda m, n=name: f"{n}: {m}",
        )
