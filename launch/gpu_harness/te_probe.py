"""Program: run kernels of Transformer Engine's library once. It fails if the driver refuses them.

A library whose machine code was reduced to one architecture imports on every machine. Only the
first launch of a kernel shows if the driver takes it.
"""

from __future__ import annotations

import torch


def main() -> None:
    """Run a norm, a matrix product and an optimizer step, and compare the product with torch's."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    options = {"normalization": "RMSNorm", "bias": False, "params_dtype": torch.bfloat16}
    layer = te.LayerNormLinear(128, 128, device="cuda", **options)
    inputs = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = layer(inputs)
    norm = torch.nn.functional.rms_norm(inputs.float(), (128,), eps=layer.eps)
    expected_output = norm @ layer.weight.float().T
    output.float().square().sum().backward()
    te.optimizers.FusedAdam(layer.parameters(), lr=1e-3).step()
    torch.cuda.synchronize()
    error = float((output.float() - expected_output).abs().max() / expected_output.abs().max())
    assert inputs.grad is not None
    is_finite = all(bool(tensor.isfinite().all()) for tensor in (inputs.grad, layer.weight))
    if not is_finite or not error < 0.05:
        raise RuntimeError(f"Transformer Engine computes wrong numbers: error {error:.3g}")


if __name__ == "__main__":
    main()
