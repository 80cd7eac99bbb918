"""Log-probability and entropy of each token from logits, without a softmax in memory.

Invariant: forward keeps at most 16 bytes per token besides its results; backward reads the logits once more.
"""

from espo_kernels.token_logprob_entropy.logprob import token_logprob_entropy

__all__ = ["token_logprob_entropy"]
