"""The machine of one stream shard, and its parts."""
