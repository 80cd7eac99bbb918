"""Log-probability and entropy of each token from logits, without a softmax in memory."""

from espo_kernels.token_logprob_entropy.logprob import token_logprob_entropy

__all__ = ["token_logprob_entropy"]
