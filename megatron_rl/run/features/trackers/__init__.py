"""Metrics for services outside of the run (`logger.wandb`, `logger.prometheus`)."""
