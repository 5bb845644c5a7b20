"""Training engines: what holds one rank's model and optimizer (`learner.protocols.TrainEngine`)."""
