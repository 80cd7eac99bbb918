"""Print the hash of each tensor of a file, by SGLang's own GPU kernel in Triton's interpreter.

TRITON_INTERPRET=1 python sglang_gpu_hash.py TENSORS.pt
"""

import importlib.metadata
import importlib.util
import json
import sys

import torch


def load_kernel():
    """Load the module alone. To import its package takes seconds."""
    path = importlib.metadata.distribution("sglang").locate_file(
        "sglang/kernels/ops/memory/gpu_tensor_hash.py"
    )
    spec = importlib.util.spec_from_file_location("gpu_tensor_hash", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU, as the function around the kernel requires."""

    is_cuda = True


if __name__ == "__main__":
    kernel = load_kernel()
    tensors = torch.load(sys.argv[1])
    print(
        json.dumps(
            [f"{kernel.gpu_tensor_hash(tensor.as_subclass(OnGpu)):016x}" for tensor in tensors]
        )
    )
