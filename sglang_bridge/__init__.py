"""Everything that speaks to SGLang: starting servers, drawing samples, sending weights, auditing them."""

from sglang_bridge.cpu_support import cpu_shim_path, declare_torchvision_schemas

__all__ = ["cpu_shim_path", "declare_torchvision_schemas"]
