"""The attention of a pass: block top-k sparse attention, shared prefixes, packed sequences."""
