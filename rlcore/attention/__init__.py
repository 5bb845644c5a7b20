"""What attention reads: block top-k sparse attention, shared prefixes, packed sequences."""
