"""A CUDA device whose memory is the host's, on a machine without a GPU."""
