"""Functions of other libraries, where they are installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch


class Peer(NamedTuple):
    """function: None when the library is missing or broken, and `reason` says why."""

    name: str
    function: Callable[..., Any] | None
    reason: str = ""


def trl_pair() -> Peer:
    """TRL's pair: eager on CPU, its own fused kernel on CUDA from 1.16."""
    name = "TRL"
    try:
        utils = import_module("trl.trainer.utils")
    except Exception as error:  # a half-installed library may raise anything
        return Peer(name, None, f"{type(error).__name__}: {error}")

    def pair(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kernel = getattr(utils, "selective_log_softmax_and_entropy", None)
        if kernel is not None:
            return kernel(logits, targets, entropy_requires_grad=False)
        with torch.no_grad():
            entropy = utils.entropy_from_logits(logits)
        return utils.selective_log_softmax(logits, targets), entropy

    return Peer(name, pair)


def verl_pair() -> Peer:
    name = "verl"
    try:
        torch_functional = import_module("verl.utils.torch_functional")
    except Exception as error:
        return Peer(name, None, f"{type(error).__name__}: {error}")

    def pair(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            entropy = torch_functional.entropy_from_logits_with_chunking(logits)
        return torch_functional.logprobs_from_logits(
            logits, targets, inplace_backward=False
        ), entropy

    return Peer(name, pair)


def torch_compile(function: Callable[..., Any], device: torch.device) -> Peer:
    """torch.compile of plain torch code."""
    name = "torch.compile"
    if device.type == "cpu" and shutil.which("g++") is None:
        return Peer(name, None, "no C++ compiler (g++) on this machine")
    return Peer(name, torch.compile(function))


def liger_cross_entropy(device: torch.device) -> Peer:
    name = "Liger-Kernel"
    if device.type != "cuda":
        return Peer(name, None, "its kernels need a GPU")
    try:
        function = import_module("liger_kernel.transformers.functional").liger_cross_entropy
    except Exception as error:
        return Peer(name, None, f"{type(error).__name__}: {error}")
    return Peer(name, function)


def torchao_quantizer() -> Peer:
    name = "torchao"
    try:
        primitives = import_module("torchao.quantization.quant_primitives")
        choose = primitives._choose_scale_float8
        quantize = primitives._quantize_affine_float8
    except Exception as error:
        return Peer(name, None, f"{type(error).__name__}: {error}")

    def function(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = [1] * (weight.dim() - 2) + [128, 128]
        scale = choose(weight, blocks)
        return quantize(weight, scale), scale

    return Peer(name, function)


def versions() -> dict[str, str]:
    """Versions of the implementations and of the libraries they run on."""
    by_package = {}
    for package in ("torch", "triton", "numba", "trl", "verl", "liger-kernel", "torchao"):
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return by_package
