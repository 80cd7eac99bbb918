"""Tells whether matrix products have the same bits whatever else is computed in the same call.

MKL chooses its kernels by the processor.
"""

import torch
from torch.nn.functional import linear

from sglang_bridge.cpu_shim.small_products import least_rows

_WIDTHS = (16, 64, 96, 128, 192, 256, 512, 1024)


def _has_same_rows_in_all_sizes(width: int) -> bool:
    """Return True if products of `least_rows` or more rows equal those rows of a larger product.

    The CPU engine relies on this property.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, width, generator=generator)
    weight = torch.randn(128, width, generator=generator)
    product = linear(x, weight)
    sizes = (*range(least_rows(width), 18), 33, 130)
    return all(torch.equal(linear(x[:rows], weight), product[:rows]) for rows in sizes)


def _is_exact() -> bool:
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return all(map(_has_same_rows_in_all_sizes, _WIDTHS))
    finally:
        torch.set_num_threads(num_threads)


EXACT = _is_exact()
