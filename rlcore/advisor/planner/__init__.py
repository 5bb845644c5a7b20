"""Forecasts of runs: the project's own loop on actors and learners that take simulated time."""
