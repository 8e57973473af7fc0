"""A lake: a copy of a stream in Parquet files, and the manifest that says which belong to it.

Needs no Spark. `docs/lake.md` describes the format.
"""
