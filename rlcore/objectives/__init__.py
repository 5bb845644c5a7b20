"""Advantages, policy losses, KL and aggregation: pure tensor functions."""
