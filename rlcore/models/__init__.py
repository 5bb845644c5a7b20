"""Model folders, fresh models, and the text that models read and write."""

from rlcore.models.exported_names import keep_exported_names

keep_exported_names()
