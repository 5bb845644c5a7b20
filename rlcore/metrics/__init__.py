"""Metric names, the sinks that receive them, and the HTML report."""
