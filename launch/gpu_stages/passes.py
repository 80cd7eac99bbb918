"""Equality of the log-probabilities of the old-policy pass and the update, bit for bit."""

from __future__ import annotations

from megatron_rl.mcore import compat

compat.install()

from launch.gpu_stages import both_passes
from launch.gpu_stages.stage import Report, Setting, run
from megatron_rl.mcore import parallel


def passes(setting: Setting, report: Report) -> None:
    """Compare four old-policy passes and an update over one batch, at eight experts a token."""
    layout = parallel.initialize(both_passes.GRID, seed=0)
    both_passes.write_model(setting.scratch)
    for dtype in ("float32", "bfloat16"):
        result = both_passes.run(layout, setting.scratch, dtype)
        report.require(f"{dtype}_passes_equal", bool(result["same"]))
        report.require_at_most(f"{dtype}_first_ratio_deviation", float(result["deviation"]), 0.0)
        report.require(f"{dtype}_second_update_moved", float(result["ratio_change"]) > 0)
    parallel.shutdown()


if __name__ == "__main__":
    run(passes)
