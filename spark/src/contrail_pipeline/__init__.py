"""Jobs on streams that run with Spark: the commands of `contrail pipeline`."""
