"""Bad input is an error that names the argument, the same from every backend."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from espo_kernels import (
    EspoGroups,
    espo_groups,
    espo_policy_loss,
    quantize_fp8_blockwise,
    token_logprob_entropy,
)
from espo_kernels.backends import checks_values, resolve_backend

BACKENDS = ["reference", "cpu"]
NAN = float("nan")
INF = float("inf")


def call_logprob(backend: str, **changes: Any) -> None:
    arguments = {
        "logits": torch.zeros(3, 8),
        "targets": torch.tensor([0, 3, 7]),
        "backend": backend,
        **changes,
    }
    token_logprob_entropy(arguments.pop("logits"), arguments.pop("targets"), **arguments)


def call_groups(backend: str, **changes: Any) -> None:
    arguments = {
        "old_entropies": torch.ones(5),
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "vocab_size": 8,
        **changes,
    }
    espo_groups(
        arguments.pop("old_entropies"), arguments.pop("cu_seqlens"), backend=backend, **arguments
    )


GROUPS = EspoGroups(
    torch.tensor([0, 1, 0, 1, 1], dtype=torch.uint8),
    torch.full((2, 2), 0.1),
    torch.tensor([[1, 1], [1, 2]]),
)


def call_loss(backend: str, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "logprobs": -torch.ones(5),
        "old_logprobs": -torch.ones(5),
        "advantages": torch.ones(5),
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "groups": GROUPS,
        **changes,
    }
    espo_policy_loss(backend=backend, **arguments)


def with_value(value: float) -> torch.Tensor:
    return torch.tensor([-1.0, value, -1.0, -1.0, -1.0])


REFUSED: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (call_logprob, {"logits": torch.zeros(3)}, r"logits has shape \(3,\)"),
    (call_logprob, {"logits": torch.zeros(3, 8, dtype=torch.long)}, "logits has dtype"),
    (call_logprob, {"targets": torch.tensor([0, 1])}, r"targets has shape \(2,\)"),
    (call_logprob, {"targets": torch.zeros(3)}, "targets has dtype"),
    (call_logprob, {"targets": torch.tensor([0, 8, 1])}, r"targets\[1\] is 8: must be in \[0, 8\)"),
    (call_logprob, {"targets": torch.tensor([0, 1, -100])}, r"targets\[2\] is -100"),
    (call_logprob, {"vocab_size": 6}, r"targets\[2\] is 7: must be in \[0, 6\)"),
    (call_logprob, {"vocab_size": 9}, "vocab_size=9: must be an integer from 1 to 8"),
    (call_logprob, {"vocab_size": NAN}, "vocab_size=nan: must be an integer from 1 to 8"),
    (call_logprob, {"vocab_size": 7.5}, "vocab_size=7.5: must be an integer from 1 to 8"),
    (
        call_logprob,
        {"targets": torch.tensor([200, 0, 0], dtype=torch.uint8)},
        r"targets\[0\] is 200",
    ),
    (call_logprob, {"temperature": 0.0}, "temperature=0.0: must be finite and positive"),
    (call_logprob, {"temperature": NAN}, "temperature=nan"),
    (call_logprob, {"temperature": 1e-40}, "temperature=1e-40: .* 1 / temperature within float32"),
    (
        call_logprob,
        {"logits": torch.tensor([[0.0, 1.0], [NAN, 0.0]]), "targets": torch.tensor([0, 1])},
        r"logits\[1\]",
    ),
    (
        call_logprob,
        {"logits": torch.tensor([[0.0, INF]]), "targets": torch.tensor([0])},
        r"logits\[0\] has NaN or \+inf",
    ),
    (
        call_logprob,
        {"logits": torch.full((1, 4), -INF), "targets": torch.tensor([0])},
        "no finite entry",
    ),
    (
        call_logprob,
        {"targets": torch.zeros(3, dtype=torch.long, device="meta")},
        "on different devices .*targets on meta",
    ),
    (call_groups, {"old_entropies": torch.ones(5, 1)}, "old_entropies has shape"),
    (
        call_groups,
        {"cu_seqlens": torch.tensor([0, 3, 2, 5])},
        r"cu_seqlens\[2\] is|cu_seqlens\[2\] = 2",
    ),
    (
        call_groups,
        {"cu_seqlens": torch.tensor([0, 2, 4])},
        "cu_seqlens runs from 0 to 4: must run from 0 to 5",
    ),
    (call_groups, {"cu_seqlens": torch.tensor([1, 2, 5])}, "cu_seqlens runs from 1 to 5"),
    (call_groups, {"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens has dtype"),
    (call_groups, {"cu_seqlens": torch.zeros(0, dtype=torch.long)}, "cu_seqlens has shape"),
    (
        call_groups,
        {"cu_seqlens": torch.tensor([0])},
        "cu_seqlens .* names no sequence for the 5 tokens",
    ),
    (
        call_groups,
        {"old_entropies": torch.tensor([1.0, NAN, 1, 1, 1])},
        r"old_entropies\[1\] is nan",
    ),
    (call_groups, {"vocab_size": 1}, "vocab_size=1"),
    (call_groups, {"fractions": (0.0,)}, "fractions"),
    (call_groups, {"fractions": (0.7, 0.7)}, "fractions.*must not exceed 1"),
    (call_groups, {"fractions": (NAN,)}, r"fractions=\(nan,\): each must lie between"),
    (call_groups, {"fractions": (INF,)}, r"fractions=\(inf,\): each must lie between"),
    (
        call_groups,
        {"fractions": (1e-9,)},
        r"fractions=\(1e-09,\): each must lie between 1e-6 and 1 - 1e-6",
    ),
    (call_groups, {"fractions": 0.2}, "fractions=0.2: must be a sequence of numbers"),
    (
        call_groups,
        {"fractions": ("many",)},
        r"fractions=\('many',\): must be a sequence of numbers",
    ),
    (call_groups, {"vocab_size": NAN}, "vocab_size=nan: must be an integer of at least 2"),
    (call_groups, {"fractions": (0.01,) * 16}, "fractions has 16 entries"),
    (call_groups, {"alpha": -1.0}, "alpha=-1.0"),
    (call_groups, {"min_clip": NAN}, "min_clip=nan"),
    (call_groups, {"fixed_clip": -0.1}, "fixed_clip=-0.1"),
    (call_groups, {"loss_mask": torch.ones(4, dtype=torch.bool)}, r"loss_mask has shape \(4,\)"),
    (call_groups, {"loss_mask": torch.ones(5)}, "loss_mask has dtype"),
    (call_loss, {"old_logprobs": -torch.ones(4)}, "old_logprobs has shape"),
    (call_loss, {"advantages": torch.ones(6)}, "advantages has shape"),
    (call_loss, {"cu_seqlens": torch.tensor([0, 5])}, r"groups.clip has shape \(2, 2\)"),
    (
        call_loss,
        {"cu_seqlens": torch.tensor([0])},
        "cu_seqlens .* names no sequence for the 5 tokens",
    ),
    (call_loss, {"cu_seqlens": torch.tensor([0, 6, 5])}, r"cu_seqlens\[2\]"),
    (call_loss, {"logprobs": with_value(NAN)}, r"logprobs\[1\] is nan"),
    (call_loss, {"old_logprobs": with_value(-INF)}, r"old_logprobs\[1\] is -inf"),
    (call_loss, {"advantages": with_value(NAN)}, r"advantages\[1\] is nan"),
    (call_loss, {"num_sequences": 0}, "num_sequences=0: must be positive"),
    (call_loss, {"num_sequences": INF}, "num_sequences=inf: must be positive and finite"),
    (call_loss, {"num_sequences": "3"}, "num_sequences='3': must be a number or a tensor of one"),
    (call_loss, {"num_sequences": torch.tensor(0)}, "num_sequences=0: must be positive"),
    (call_loss, {"num_sequences": torch.tensor([NAN])}, "num_sequences=nan: must be positive"),
    (
        call_loss,
        {"num_sequences": torch.ones(2)},
        r"num_sequences has shape \(2,\): must hold one number",
    ),
    (call_loss, {"num_sequences": torch.tensor(True)}, "num_sequences has dtype torch.bool"),
    (call_loss, {"ratio_denominator": "new"}, "ratio_denominator='new'"),
    (call_loss, {"loss_mask": torch.ones(4, dtype=torch.bool)}, "loss_mask has shape"),
    (
        call_loss,
        {"groups": replace(GROUPS, group_id=GROUPS.group_id[:4])},
        "groups.group_id has shape",
    ),
    (
        call_loss,
        {"groups": replace(GROUPS, group_id=GROUPS.group_id.int())},
        "groups.group_id has dtype",
    ),
    (
        call_loss,
        {"groups": replace(GROUPS, group_id=GROUPS.group_id + 1)},
        r"groups.group_id\[1\] is 2: must be below 2",
    ),
    (call_loss, {"groups": replace(GROUPS, clip=GROUPS.clip * NAN)}, "groups.clip has NaN"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "changes", "message"), REFUSED)
def test_invalid_arguments_are_refused_by_name(
    backend: str, call: Callable[..., None], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(backend, **changes)


@pytest.mark.parametrize("call", [call_logprob, call_groups, call_loss])
@pytest.mark.parametrize("backend", BACKENDS)
def test_valid_calls_are_accepted(backend: str, call: Callable[..., None]) -> None:
    call(backend)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.zeros(4), {}, "weight has shape"),
        (torch.zeros(4, 4, dtype=torch.float64), {}, "weight has dtype torch.float64"),
        (torch.zeros(4, 4, dtype=torch.long), {}, "weight has dtype"),
        (torch.zeros(4, 4), {"block": 100}, "block=100: must be a power of two from 16 to 256"),
        (
            torch.zeros(4, 4),
            {"block": 512, "backend": "reference"},
            "block=512: must be a power of two from 16 to 256.* use 128",
        ),
        (
            torch.zeros(4, 4),
            {"block": 128.0},
            "block=128.0: must be a power of two from 16 to 256",
        ),
        (torch.tensor([[1.0, NAN]]), {}, "weight has NaN or infinite"),
        (torch.tensor([[1.0, INF]]), {}, "weight has NaN or infinite"),
    ],
)
def test_invalid_weights_are_refused_by_name(
    weight: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        quantize_fp8_blockwise(weight, **options)


def test_backend_is_refused_when_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend='fast': must be"):
        call_logprob("fast")
    with pytest.raises(ValueError, match="backend='triton' got tensors on cpu"):
        call_groups("triton")
    with pytest.raises(ValueError, match="backend='cpu' computes in float32"):
        call_logprob("cpu", logits=torch.zeros(3, 8, dtype=torch.float64))
    assert resolve_backend("auto", torch.zeros(1, dtype=torch.float64)) == "reference"
    assert resolve_backend("auto", torch.zeros(1)) == "cpu"


def test_debug_switch_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = torch.zeros(1, device="meta")
    monkeypatch.delenv("ESPO_KERNELS_DEBUG", raising=False)
    assert not checks_values(elsewhere, "triton")
    assert checks_values(elsewhere, "reference"), "it synchronises anyway"
    assert checks_values(torch.zeros(1), "triton")
    monkeypatch.setenv("ESPO_KERNELS_DEBUG", "1")
    assert checks_values(elsewhere, "triton")


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        (call_logprob, {"targets": torch.tensor([0, 8, 1])}),
        (call_logprob, {"logits": torch.full((3, 8), NAN, dtype=torch.float64)}),
        (call_groups, {"cu_seqlens": torch.tensor([0, 2, 4])}),
        (call_groups, {"old_entropies": torch.full((5,), NAN, dtype=torch.float64)}),
        (call_loss, {"cu_seqlens": torch.tensor([0, 2, 4])}),
        (call_loss, {"logprobs": torch.full((5,), -INF, dtype=torch.float64)}),
        (call_loss, {"num_sequences": torch.tensor(0)}),
    ],
)
def test_the_reference_checks_values_on_any_device(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., None], changes: dict[str, Any]
) -> None:
    """float64 tensors on a GPU go to the reference, where the device alone requires no checks."""
    elsewhere = torch.zeros(1, device="meta")
    monkeypatch.delenv("ESPO_KERNELS_DEBUG", raising=False)
    for name in ("token_logprob_entropy.logprob", "espo_groups.groups", "espo_policy_loss.loss"):
        module = import_module(f"espo_kernels.{name}")
        monkeypatch.setattr(
            module,
            "checks_values",
            lambda tensor, backend, override: checks_values(elsewhere, backend),
        )
    name, width = {
        call_logprob: ("logits", (3, 8)),
        call_groups: ("old_entropies", 5),
        call_loss: ("logprobs", 5),
    }[call]
    with pytest.raises(ValueError, match=r"must|has diverged"):
        call("auto", **{name: -torch.ones(width, dtype=torch.float64), **changes})


@pytest.mark.parametrize("call", [call_groups, call_loss])
def test_tokens_without_sequences_are_refused_by_shape(call: Callable[..., None]) -> None:
    """The check reads no values, which the meta device does not have."""
    name = "old_entropies" if call is call_groups else "logprobs"
    with pytest.raises(
        ValueError, match=r"cu_seqlens has shape \(1,\): names no sequence for the 5 tokens"
    ):
        call(
            "auto",
            **{name: torch.ones(5, device="meta")},
            cu_seqlens=torch.zeros(1, dtype=torch.long, device="meta"),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_num_sequences_as_a_tensor_is_the_number(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tokens = (
        -torch.ones(5),
        torch.tensor([-1.0, -2, -1, -1, -1]),
        torch.ones(5),
        torch.tensor([0, 2, 5]),
    )
    reference = espo_policy_loss(*tokens, GROUPS, num_sequences=3, backend=backend).loss
    count_tensor = torch.full(shape, 3, dtype=dtype)
    loss = espo_policy_loss(*tokens, GROUPS, num_sequences=count_tensor, backend=backend).loss
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, reference)


@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [(torch.uint8, 256), (torch.int8, 128), (torch.int8, 300), (torch.int16, 40_000)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_targets_are_compared_as_wide_numbers(
    backend: str, dtype: torch.dtype, vocabulary: int
) -> None:
    logits = torch.randn(2, vocabulary)
    targets = torch.tensor([5, torch.iinfo(dtype).max])
    reference = token_logprob_entropy(logits, targets, backend=backend)[0]
    assert torch.equal(
        token_logprob_entropy(logits, targets.to(dtype), backend=backend)[0], reference
    )
