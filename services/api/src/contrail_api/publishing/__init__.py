"""Publishing: one message, batches in three formats, atomic batches."""
