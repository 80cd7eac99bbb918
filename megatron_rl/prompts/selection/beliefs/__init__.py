"""Beliefs about the pass rates of prompts: one Kalman filter a prompt."""
