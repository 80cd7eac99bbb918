"""`python -m tests.lab.engine_rehearsal.export_process REQUEST REPLY`: what the trainer sends.

It builds Megatron's model at full width, without memory, and exports it as a weight sync does.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import msgspec

from tests.lab.engine_rehearsal.requests import ExportRequest, TensorSpec


def export_names(request: ExportRequest) -> list[TensorSpec]:
    """The tensors of a weight sync, in their order."""
    warnings.filterwarnings("ignore")  # Megatron names the libraries that this machine lacks
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron_rl.config.schema import ModelSettings, ParallelSettings
    from megatron_rl.mcore import compat

    compat.install()
    from megatron_rl.mcore import parallel
    from megatron_rl.mcore.dtypes import torch_dtype
    from megatron_rl.mcore.model import build_models
    from megatron_rl.mcore.weights import iterate_hf_weights
    from megatron_rl.models.families import read_shape

    shape = read_shape(request.model_path)
    # The export converts to the engine's dtype, so the model may keep float32.
    model = ModelSettings(path=request.model_path, dtype="float32", spec="local")
    settings = ParallelSettings()
    parallel.initialize(settings, seed=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        models = build_models(shape, model, settings, on_gpu=False)
        return [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in iterate_hf_weights(models, shape, torch_dtype(request.dtype))
        ]


def main() -> None:
    """Read the request, and write the tensors."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ExportRequest)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(export_names(request)))


if __name__ == "__main__":
    main()
