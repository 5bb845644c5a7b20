"""Thin Ray actors around the stages. They make no decisions: each method passes plain arguments on.

What can fail at start is done in `start`, not in `__init__`, so that the caller receives the error
itself.

Records go from rollout actor to buffer to learner ranks as the bytes that the rollout actor made of
them. Graders get text and send scores to the buffer; the loop sees counts, ids and references only.
"""
