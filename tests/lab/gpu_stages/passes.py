"""Equality of the log-probabilities of the old-policy pass and the update, bit for bit."""

from __future__ import annotations

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.mcore import parallel
from megatron_rl.mcore.parallel import RankLayout
from tests.lab.gpu_stages import both_passes
from tests.lab.gpu_stages.stage import Report, Setting, run
from tests.support.layer_specs import named_te_limits, spec_variants


def passes(setting: Setting, report: Report) -> None:
    """Compare four old-policy passes and an update over one batch, at eight experts a token.

    Each model runs with local layers in float32 and bfloat16, and with Transformer Engine.
    """
    layout = parallel.initialize(both_passes.GRID, seed=0)
    for model in both_passes.MODELS:
        both_passes.write_model(setting.scratch / model, model)
    for spec, dtype in spec_variants(report):
        for model in both_passes.MODELS:
            name = f"{model} {spec} {dtype}"
            with report.part(name), named_te_limits(spec):
                _compare(layout, setting, model, spec, dtype, report, name)
    parallel.shutdown()


def _compare(
    layout: RankLayout,
    setting: Setting,
    model: str,
    spec: str,
    dtype: str,
    report: Report,
    name: str,
) -> None:
    result = both_passes.run(layout, setting.scratch / model, dtype, spec)
    report.require(f"{name} passes_equal", bool(result["same"]))
    report.require_at_most(f"{name} first_ratio_deviation", float(result["deviation"]), 0.0)
    # Otherwise ratios would be 1 whatever happened.
    report.require(f"{name} second_update_moved", float(result["ratio_change"]) > 1e-3)
    report.require(f"{name} has_several_batches", result["batches"] > 1)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(passes)
