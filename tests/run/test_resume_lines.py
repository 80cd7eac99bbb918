"""The lines that say where a run continues, or which weights it measures."""

from pathlib import Path

import pytest

from megatron_rl.run.checkpoints.resume import ResumePoint
from megatron_rl.run.open_run import resume_lines
from tests.support.checkpoints import make_state


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("train", "resuming after step 6, from"),
        ("train_only", "resuming after step 6, from"),
        ("eval", "measuring the weights after step 6, from"),
        ("profile", "measuring the weights after step 6, from"),
    ],
)
def test_a_measurement_of_a_checkpoint_resumes_nothing(mode: str, words: str) -> None:
    checkpoint = Path("runs/mine/checkpoints/iter_0000006")
    resume_point = ResumePoint(checkpoint, make_state(6))
    first, second = resume_lines(resume_point, ["seed: 0 -> 1"], mode)
    assert first == f"{words} {checkpoint}"
    assert second == "changed since the checkpoint: seed: 0 -> 1"
    assert list(resume_lines(ResumePoint(None, None), [], mode)) == []
