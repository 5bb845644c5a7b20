"""Model folders, fresh models, and the text that models read and write."""
