"""rlcore: asynchronous actor-learner reinforcement learning of language models."""
