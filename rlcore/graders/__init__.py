"""Judges of answers, apart from tasks: mathematics, programs and the sandbox that runs them."""
