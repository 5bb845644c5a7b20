"""Training engines: what holds one rank's model and optimizer (`learner.protocols.TrainEngine`)."""

from rlcore.lazy import defer

# Imported by transformers for losses of object detection
defer("scipy.optimize", names=("linear_sum_assignment",))
