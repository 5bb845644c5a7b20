"""Sampled tokens that any trainer has written, with the log-probs of both policies: what differs,
whether correcting pays, and by which correction. Needs torch, numpy, pydantic and PyYAML alone."""
