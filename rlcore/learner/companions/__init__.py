"""Companions: what is trained beside the policy in its ranks (`learner.protocols.Companion`)."""
