"""The learner: one DeepSpeed rank, its micro-batches and the chunked LM-head pass."""
