"""Advice before and after a run: forecasts of plans, the simulated loop, the doctor."""
