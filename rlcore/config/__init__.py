"""The typed configuration. Imports neither torch nor Ray nor vLLM, so `--help` and a wrong key
answer at once."""
