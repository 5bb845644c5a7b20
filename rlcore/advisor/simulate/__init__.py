"""The whole loop in one process and in simulated time, for the planner and for tests of schedules
and failures."""
