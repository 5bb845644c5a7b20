"""Everything that uses Ray, without decisions: actors, their clients, their start."""
