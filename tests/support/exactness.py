"""Where sums have the same bits whatever is computed beside them: MKL chooses its kernels by the
processor.
"""

import torch
from torch.nn.functional import linear


def _rows_are_alike() -> bool:
    """Whether four rows and more of a product are those of a larger one, which is what the CPU
    engine builds on.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(700, 64, generator=generator), torch.randn(128, 64, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = linear(x, weight)
    alike = all(
        torch.equal(linear(x[:rows], weight), whole[:rows]) for rows in (4, 5, 7, 16, 33, 130, 512)
    )
    torch.set_num_threads(threads)
    return alike


EXACT = (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkl.is_available()
    and _rows_are_alike()
)
