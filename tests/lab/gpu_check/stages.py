"""The stages of the check, their limits, and the three calls that run them."""

from __future__ import annotations

from dataclasses import dataclass

BUDGET_S = 540.0


@dataclass(frozen=True)
class Stage:
    """A stage: `python -m tests.lab.gpu_stages.MODULE ... CHOICES`.

    limit: seconds that it is sure to get in its part. It also gets what earlier stages left, up to
    as much again.
    choices: see `Setting` in tests/lab/gpu_stages/stage.py.
    archives: on its path, if they fit this machine. needs: archives without which it is skipped.
    compiles: True if it compiles Triton kernels on a GPU, for which it needs a C compiler.
    not_pretended: why it cannot run on tests/lab/pretended_device; empty if it can.
    """

    limit: int
    module: str
    choices: tuple[str, ...] = ()
    archives: tuple[str, ...] = ("base",)
    needs: tuple[str, ...] = ("base",)
    compiles: bool = True
    not_pretended: str = ""


_WITH_TE = ("base", "te")
_WITH_ENGINE = ("base", "engine")
_MEASURES = "it measures a GPU"
_NO_SGLANG = "SGLang needs a GPU"
STAGES = {
    "machine": Stage(
        50,
        "machine",
        archives=("base", "te", "engine"),
        needs=(),
        compiles=False,
        not_pretended="it describes a GPU",
    ),
    "attention": Stage(35, "attention", compiles=False),
    "parity": Stage(55, "parity", archives=_WITH_TE, compiles=False),
    "kernels": Stage(100, "kernels", not_pretended="Triton compiles its kernels for a GPU"),
    "passes": Stage(55, "passes", archives=_WITH_TE),
    "train": Stage(85, "train", archives=_WITH_TE),
    "state": Stage(60, "state", archives=_WITH_TE),
    "export": Stage(30, "export", compiles=False),
    "quantize": Stage(20, "quantize"),
    "fp8_training": Stage(
        40,
        "fp8_training",
        archives=_WITH_TE,
        needs=_WITH_TE,
        not_pretended="Transformer Engine needs a GPU",
    ),
    "engine_on_cpu": Stage(
        140,
        "engines.engine",
        choices=("cpu",),
        archives=_WITH_ENGINE,
        needs=_WITH_ENGINE,
        not_pretended=_NO_SGLANG,
    ),
    "fp8_product": Stage(50, "fp8_product", not_pretended=_MEASURES),
    "bench": Stage(80, "bench", choices=("objective", "quantize"), not_pretended=_MEASURES),
    "sanitizer": Stage(160, "sanitizer", not_pretended="compute-sanitizer needs a GPU"),
    "colocated": Stage(60, "engines.colocated", not_pretended="its engine is another process"),
    "engine": Stage(
        40,
        "engines.engine",
        archives=_WITH_ENGINE,
        needs=_WITH_ENGINE,
        not_pretended=_NO_SGLANG,
    ),
    "bench_logprob": Stage(190, "bench", choices=("logprob",), not_pretended=_MEASURES),
    "profile": Stage(90, "profile", not_pretended=_MEASURES),
    "train_local": Stage(85, "train", choices=("local",)),
}
# The most informative stages come first. The limits of a part fit one call of ten minutes.
PARTS = {
    1: (
        "machine",
        "attention",
        "parity",
        "kernels",
        "passes",
        "train",
        "state",
        "export",
        "quantize",
        "fp8_training",
    ),
    2: ("engine_on_cpu", "fp8_product", "bench", "sanitizer", "colocated", "engine"),
    3: ("bench_logprob", "train", "passes", "profile", "train_local"),
}


def stage_limit(limit: float, later: float, remaining: float) -> float:
    """Return the seconds that a stage may take; 0 or less if the budget is spent.

    limit: of the stage. later: the sum of the limits of the stages that follow, which is kept free.
    remaining: seconds of the budget.
    """
    spare = remaining - later
    return min(max(limit, min(spare, 2 * limit)), remaining)
