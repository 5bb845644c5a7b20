"""Masked-diffusion models as a rollout engine, on torch alone."""
