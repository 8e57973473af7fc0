"""Imports PySpark from its folder in the Python processes that Spark starts for a test.

Spark puts an archive of the same modules before it, from which each process would compile them
again: that takes longer than most tests.
"""

import sys

sys.path[:] = [entry for entry in sys.path if not entry.endswith("/lib/pyspark.zip")]
