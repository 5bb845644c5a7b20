"""Advantages, policy losses, KL, aggregation: pure tensor functions."""
