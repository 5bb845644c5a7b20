"""Block top-k sparse attention: one selection rule, used by the actor's attention backends and by the learner."""
