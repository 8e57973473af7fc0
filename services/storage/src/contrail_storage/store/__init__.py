"""What the node keeps on disk besides its log."""
