"""Block top-k sparse attention: one selection rule for actors and learner."""
