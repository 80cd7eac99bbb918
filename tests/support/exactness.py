"""Where sums have the same bits whatever is computed beside them: MKL chooses its kernels by the processor."""

import torch

EXACT = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkl.is_available()
