"""Megatron-Core on a machine without CUDA, and on one without Transformer Engine and Apex."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

from megatron_rl.contracts.launch_facts import has_transformer_engine

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")


class _Stream:
    """All CPU work is synchronous: there is one stream, and waiting for it is no work."""

    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...


def install() -> bool:
    """Make `megatron.core` run here, whatever is missing; returns whether torch was changed, as it
    is without CUDA.
    """
    if issubclass(torch.cuda.Stream, _Stream):
        return False
    _hush_expected_warnings()
    if torch.cuda.is_available():
        _replace_missing_libraries(every=False)
        _add_in_one_order()
        return False
    _patch_torch_cuda()
    _patch_torch_factories()
    with _nothing_compiled():
        _replace_missing_libraries(every=True)
        _patch_megatron()
    return True


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """While Megatron is imported it marks small functions for torch.compile.

    On CPUs they stay as they are: the mark alone imports torch's compiler, two seconds in every
    rank, and the call needs one for C++.
    """

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return function if function is not None else as_it_is

    library: Any = torch
    compiled, library.compile = library.compile, as_it_is
    try:
        yield
    finally:
        library.compile = compiled


def _hush_expected_warnings() -> None:
    """What these say is true on every rank of every such run, and nothing a user could act on."""
    expected = (
        ".*(Apex|Transformer Engine).*",  # that they are missing is why this module exists
        ".*reduce_scatter_tensor.*is deprecated.*",  # Megatron's names for torch's collectives
        ".*all_gather_into_tensor.*is deprecated.*",
        # Megatron looks at the distributed optimizer's shards
        "The .grad attribute of a Tensor that is not a leaf.*",
    )
    for message in expected:
        warnings.filterwarnings("ignore", message=message)


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 0
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    for name in (
        "set_device",
        "set_stream",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
    ):
        setattr(cuda, name, lambda *_, **__: None)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(
        int(seed)
    )
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_torch_factories() -> None:
    """Megatron writes device="cuda" (or the current device) into factory calls, and tests for CUDA
    tensor types.
    """
    # torch caches its factory functions on first use; fill that cache with the originals, or a
    # `torch.device("meta")` context no longer recognises the wrapped ones
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self
    original_type = tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name = original_type(self)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    tensor.type = cuda_type


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _replace_missing_libraries(*, every: bool) -> None:
    """What Megatron takes from Transformer Engine or Apex and cannot do without.

    every: replace what it found, too; False: nothing changes where it found one of them.
    """
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention

    from megatron_rl.mcore.cpu.adam import FusedLayoutAdam

    # 0.16.1 defines this name only where Transformer Engine imports, and reads it everywhere
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if every or not has_transformer_engine():
        # 0.16.1 takes the imports of its own stand-ins for Transformer Engine's layers, None, for
        # the real ones
        multi_latent_attention.HAVE_TE = False
    if distrib_optimizer.HAVE_APEX_OR_TE and not every:
        return
    # Megatron falls back to torch's Adam, whose state it cannot checkpoint
    optimizer.Adam = distrib_optimizer.Adam = FusedLayoutAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def _add_in_one_order() -> None:
    """On CPUs additions already have an order."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    from megatron_rl.mcore.deterministic_permute import ordered_permute, ordered_unpermute

    token_dispatcher.permute = ordered_permute(token_dispatcher.permute)
    token_dispatcher.unpermute = ordered_unpermute(token_dispatcher.unpermute)


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    from megatron_rl.mcore.cpu.padded_collectives import padded_gather, padded_reduce_scatter

    # the RNG tracker drives a CUDA generator that does not exist
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    # split sizes become numpy only for CUDA tensors, and the all-to-all insists on that
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    # the token dispatcher's collectives over the ranks that share an expert
    mappings._gather_along_first_dim = padded_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = padded_reduce_scatter(
        mappings._reduce_scatter_along_first_dim
    )
