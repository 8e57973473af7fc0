"""The storage node: streams and consumers as pure state machines, on a shared log and RocksDB."""
