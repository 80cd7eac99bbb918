"""Checkpoints are compared by their steps, not by their names."""

from pathlib import Path

import pytest

from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.checkpoints.resume import flat_configuration, open_run_directory
from megatron_rl.run.checkpoints.store import CheckpointStore
from tests.run.checkpoints.test_resume import find_for, make_configuration
from tests.support.checkpoints import flip_bit, save_checkpoint
from tests.support.past_runs import make_run_directory


@pytest.mark.slow
def test_a_damaged_checkpoint_with_more_digits_is_newer_and_set_aside(tmp_path: Path) -> None:
    """Step 10000000 comes after step 9999999."""
    directory = make_run_directory(make_configuration(tmp_path))
    store = CheckpointStore(directory.checkpoints)
    c = make_configuration(tmp_path, "run.resume=auto")
    for step in (9_999_998, 9_999_999, 10_000_000):
        save_checkpoint(store, step, flat_configuration(c))
    flip_bit(store.path(10_000_000) / "tensors")
    open_run_directory(RunDirectory(directory.path), c, find_for(c))
    assert store.checkpoints() == [store.path(9_999_999), store.path(9_999_998)]
    assert (store.folder / "iter_10000000.damaged-1" / "tensors").exists()
