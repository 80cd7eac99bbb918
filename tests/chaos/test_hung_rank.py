"""A rank that hangs in user code, in a real run of two ranks."""

import re
import time
from pathlib import Path

import pytest

from megatron_rl.models.families import read_shape
from tests.support.jobs import start_job
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.recordings import write_recording

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.chaos,
    pytest.mark.distributed,
    pytest.mark.timeout(300),
]

STEPS = 2
PLUGINS = Path(__file__).with_name("plugins")
STALL = re.compile(
    r"rank 1 \(Train, step \d\) has been at the same place for \d+ s:.*"
    r"hanging_loss\.py:\d+ wait_for_file\n"
    r"the other rank waits for it",
    re.DOTALL,
)


def test_the_hung_rank_is_named_with_its_stack_within_30_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    write_recording(tmp_path / "rollouts/recorded", read_shape(TWO_DIGIT_ADDITION), steps=STEPS)
    end_file = tmp_path / "end"
    job = start_job(
        tmp_path,
        "mode=train_only",
        f"rollout.recording={tmp_path / 'rollouts'}",
        "parallel=ep2",
        "model.dtype=bfloat16",
        "train.max_route_disagreement=1",
        f"train.total_steps={STEPS}",
        "run.save_weights=false",
        "logger.progress=true",
        "algo=custom",
        "algo.name=hanging_loss:HangingLoss",
        f"algo.options={{calls: 2, end_file: {end_file}}}",
        ranks=2,
    )
    assert job.stdout is not None
    output = ""
    first_line_time = 0.0
    for line in job.stdout:
        output += line
        if "training on the batch of step" in line and not first_line_time:
            first_line_time = time.monotonic()
        if STALL.search(output):
            break
    assert STALL.search(output), output[-3000:]
    # The first line is printed ten seconds after the beginning of the step
    assert time.monotonic() - first_line_time < 20 + 5
    end_file.touch()
    rest, _ = job.communicate(timeout=120)
    assert job.returncode == 0, (output + rest)[-3000:]
