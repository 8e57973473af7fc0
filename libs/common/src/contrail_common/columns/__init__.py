"""Messages in columns: blocks, batches, headers, deliveries and sealed content."""
