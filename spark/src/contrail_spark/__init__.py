"""Contrail streams as Spark DataFrames, and the jobs built on them."""
