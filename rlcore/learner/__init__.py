"""The learner: one training rank, its micro-batches and the chunked LM-head pass."""
