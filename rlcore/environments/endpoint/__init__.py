"""Programs that speak to an OpenAI-style chat completions endpoint, as environments."""
