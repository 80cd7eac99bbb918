"""A CUDA device whose memory is the host's, for torch's CPU build."""
