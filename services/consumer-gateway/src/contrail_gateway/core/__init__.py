"""The rules of delivery at the edge, free of IO."""
