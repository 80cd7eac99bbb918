"""Layer specs that run on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch

from megatron_rl.mcore.gpu_libraries import transformer_engine_fault
from tests.lab.gpu_stages.stage import Report, StageSkipped

# In the error of Transformer Engine if no kernel takes the sizes of the heads
_NO_ATTENTION = "attention backend"


def te_obstacle() -> str:
    """Return why layers of Transformer Engine do not run here, empty if they do."""
    if not torch.cuda.is_available():
        return "it needs CUDA"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    return transformer_engine_fault()


def spec_variants(report: Report) -> list[tuple[str, str]]:
    """Return the layer specs that run here, each with a dtype, and note why `te` does not.

    `te` comes last, so that its failure leaves the other results.
    """
    variants = [("local", "float32"), ("local", "bfloat16")]
    if obstacle := te_obstacle():
        report.note("te", f"skipped: {obstacle}")
        return variants
    return [*variants, ("te", "bfloat16")]


@contextlib.contextmanager
def named_te_limits(spec: str) -> Iterator[None]:
    """Skip what Transformer Engine has no attention for, instead of failing."""
    try:
        yield
    except Exception as error:
        if spec != "te" or _NO_ATTENTION not in str(error).lower():
            raise
        raise StageSkipped(f"Transformer Engine has no attention for it: {error}") from error
