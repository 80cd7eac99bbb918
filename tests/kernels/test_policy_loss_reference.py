import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espo_kernels import espo_groups, espo_policy_loss
from tests.kernels.batches import fraction_lists, ragged_lengths, response_batch, seeds


@settings(max_examples=25, deadline=None)
@given(ragged_lengths, seeds, fraction_lists, st.sampled_from(["current", "old"]))
def test_reference_gradient_follows_the_stop_gradient(
    lengths: list[int], seed: int, fractions: tuple[float, ...], denominator: str
) -> None:
    """Finite differences of the loss with s_τ held fixed, token by token, which is what the stop-gradient means."""
    batch = response_batch(lengths, seed)
    groups = espo_groups(
        batch.entropies, batch.cu_seqlens, vocab_size=50, alpha=0.5, fractions=fractions, loss_mask=batch.loss_mask
    )
    logprobs = batch.logprobs.clone().requires_grad_()
    result = espo_policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.cu_seqlens,
        groups,
        ratio_denominator=denominator,
        num_sequences=3,
        backend="reference",
    )
    result.loss.backward()
    B, K = groups.clip.shape
    for i in range(B):
        nonempty = int((groups.count[i] > 0).sum())
        for t in range(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])):
            tau = int(groups.group_id[t])
            if tau >= K:
                assert logprobs.grad[t] == 0
                continue
            span = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
            members = groups.group_id[span] == tau
            delta = (batch.logprobs - batch.old_logprobs)[span][members]
            log_s = delta.mean() + (batch.logprobs[t] - batch.old_logprobs[t] if denominator == "old" else 0.0)
            s, A, eps = log_s.exp(), batch.advantages[t], groups.clip[i, tau]

            def term(h: float, s: torch.Tensor = s, A: torch.Tensor = A, eps: torch.Tensor = eps) -> torch.Tensor:
                moved = s * torch.tensor(h, dtype=torch.float64).exp()
                return torch.minimum(moved * A, moved.clamp(1 - eps, 1 + eps) * A)

            slope = (term(1e-6) - term(-1e-6)) / 2e-6
            expected = -slope / (3 * nonempty * members.sum())
            if min((s - 1 - eps).abs(), (s - 1 + eps).abs()) > 1e-5:
                torch.testing.assert_close(logprobs.grad[t], expected, rtol=1e-6, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(ragged_lengths, seeds, fraction_lists, st.sampled_from(["current", "old"]), st.booleans())
def test_cpu_path_equals_the_reference(
    lengths: list[int], seed: int, fractions: tuple[float, ...], denominator: str, tied: bool
) -> None:
    batch = response_batch(lengths, seed, tied=tied)
    results = {}
    for backend in ("reference", "cpu"):
        groups = espo_groups(
            batch.entropies.float(),
            batch.cu_seqlens,
            vocab_size=50,
            alpha=0.5,
            fractions=fractions,
            loss_mask=batch.loss_mask,
            backend=backend,
        )
        logprobs = batch.logprobs.float().requires_grad_()
        result = espo_policy_loss(
            logprobs,
            batch.old_logprobs.float(),
            batch.advantages.float(),
            batch.cu_seqlens,
            groups,
            ratio_denominator=denominator,
            backend=backend,
        )
        (result.loss * 3).backward()
        results[backend] = (groups, result, logprobs.grad)
    (groups_r, result_r, grad_r), (groups_c, result_c, grad_c) = results["reference"], results["cpu"]
    assert torch.equal(groups_r.group_id, groups_c.group_id)
    assert torch.equal(groups_r.count, groups_c.count)
    torch.testing.assert_close(groups_r.clip, groups_c.clip, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(result_r.loss, result_c.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_r, grad_c, rtol=1e-5, atol=1e-7)
    for name, value in result_r.metrics.values().items():
        torch.testing.assert_close(value, result_c.metrics.values()[name], rtol=1e-5, atol=1e-7, equal_nan=True)
