"""Old-policy pass and update pass compute the same log-probabilities, bit for bit, in both
precisions.
"""

from __future__ import annotations

from megatron_rl.mcore import compat

compat.install()

from launch.gpu_stages import both_passes
from launch.gpu_stages.stage import Report, Setting, run
from megatron_rl.mcore import parallel


def passes(setting: Setting, report: Report) -> None:
    """Four old-policy passes and an update over the same batches, at eight experts a token."""
    layout = parallel.initialize(both_passes.GRID, seed=0)
    both_passes.write_model(setting.scratch)
    for dtype in ("float32", "bfloat16"):
        found = both_passes.run(layout, setting.scratch, dtype)
        report.holds(f"{dtype}_passes_equal", bool(found["same"]))
        report.at_most(f"{dtype}_first_ratio_deviation", float(found["deviation"]), 0.0)
        report.holds(f"{dtype}_second_update_moved", float(found["moved"]) > 0)
    parallel.shutdown()


if __name__ == "__main__":
    run(passes)
