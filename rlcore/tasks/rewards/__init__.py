"""Rewards in addition to a task's own grader: a grader behind HTTP, a judge behind chat
completions, a local sequence classifier; added up with weights by `weighted.py: WeightedScorer`."""
