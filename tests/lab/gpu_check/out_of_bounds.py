"""Writes behind the end of a tensor on a GPU: a program that memcheck must complain about."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def out_of_bounds_kernel(out: Any, BLOCK: tl.constexpr) -> None:
    """Write BLOCK ones."""
    tl.store(out + tl.arange(0, BLOCK), 1.0)


def main() -> None:
    """Write 128 numbers into a tensor of 100."""
    tensor = torch.zeros(100, device="cuda")
    out_of_bounds_kernel[(1,)](tensor, BLOCK=128)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
