"""Mathematical answers: found in a text, parsed and compared."""
