"""A mixture that is killed and resumed ends bit for bit like one that never stopped."""

import json
from pathlib import Path

import pytest

from megatron_rl.run.checkpoints.state_file import read_state
from tests.support.comparable import assert_same_weights, metrics_of
from tests.support.exactness import EXACT
from tests.support.jobs import kill, process_tree, start_job, wait_for_step

STEPS = 5

pytestmark = [
    pytest.mark.engine,
    pytest.mark.chaos,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def write_rows(file: Path) -> Path:
    rows = [
        {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}
        for a in range(30)
        for b in range(a, 30)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings_of(rows: Path) -> tuple[str, ...]:
    sources = (
        f"rows: {{source: jsonl, train_path: {rows}, weight: 0.3}}, "
        "made: {source: two_digit_addition, weight: 0.7, num_train: 900}"
    )
    return (
        "data=mixture",
        f"data.sources={{{sources}}}",
        "data.num_eval=16",
        "selection=belief",
        f"train.total_steps={STEPS}",
        "run.checkpoint_every=1",
        "run.save_weights=true",
        "eval.every=2",
    )


def test_a_killed_and_resumed_mixture_is_one_that_never_stopped(tmp_path: Path) -> None:
    settings = settings_of(write_rows(tmp_path / "rows.jsonl"))
    reference_root = tmp_path / "uninterrupted"
    root = tmp_path / "resumed"
    job = start_job(reference_root, *settings)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output[-4000:]
    job = start_job(root, *settings)
    wait_for_step(root / "job", 2, job)
    kill(job, process_tree(job))
    job = start_job(root, *settings, "run.resume=auto")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output[-4000:]
    records = metrics_of(root / "job")
    assert records == metrics_of(reference_root / "job")
    assert records[1]["source/rows/prompts"] > 0 < records[1]["source/made/prompts"]
    assert_same_weights(root / "job", reference_root / "job", STEPS)
    last_states = [
        read_state(run / f"job/checkpoints/iter_{STEPS:07d}") for run in (root, reference_root)
    ]
    assert last_states[0].position.selection == last_states[1].position.selection
    assert len(last_states[0].position.selection.prompts.sources) == 2
