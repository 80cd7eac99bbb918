"""e4m3 weights with one float32 scale per square block, the layout FP8 rollout engines load."""

from espo_kernels.quantize_fp8_blockwise.quantize import quantize_fp8_blockwise

__all__ = ["quantize_fp8_blockwise"]
