"""Programs: which names they define, and which helpers they need."""
