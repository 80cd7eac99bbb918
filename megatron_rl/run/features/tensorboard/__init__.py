"""Metrics and heat maps for TensorBoard (`logger.tensorboard`)."""
