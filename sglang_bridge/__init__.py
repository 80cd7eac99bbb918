"""Everything that speaks to SGLang: starting servers, drawing samples, sending weights, auditing them.

Invariant: nothing here imports Megatron or the trainer, and importing this package loads neither torch nor SGLang.
"""

from sglang_bridge.cpu_support import cpu_shim_path, declare_torchvision_schemas

__all__ = ["cpu_shim_path", "declare_torchvision_schemas"]
