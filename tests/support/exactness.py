"""Tells whether matrix products have the same bits whatever else is computed in the same call.

MKL chooses its kernels by the processor.
"""

import torch
from torch.nn.functional import linear


def _has_same_rows_in_all_sizes(num_inputs: int) -> bool:
    """Return True if products of four or more rows equal those rows of a larger product.

    The CPU engine relies on this property.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(700, num_inputs, generator=generator)
    weight = torch.randn(128, num_inputs, generator=generator)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    product = linear(x, weight)
    is_same = all(
        torch.equal(linear(x[:rows], weight), product[:rows])
        for rows in (4, 5, 7, 16, 33, 130, 512)
    )
    torch.set_num_threads(num_threads)
    return is_same


EXACT = (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkl.is_available()
    and _has_same_rows_in_all_sizes(64)
)
# The same for the layers of the tiny models with most inputs. Without it, float32 log-probabilities
# of few requests at a time have other last bits.
EXACT_IN_SMALL_BATCHES = EXACT and _has_same_rows_in_all_sizes(128)
