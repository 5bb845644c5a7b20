"""Parts that a rank of the learner may have besides its engine and its update (`part.py`)."""
