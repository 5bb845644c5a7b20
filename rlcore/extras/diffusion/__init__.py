"""Masked-diffusion models: architecture, folders, engine, estimates of log-probs, and the rules of
their configuration."""
