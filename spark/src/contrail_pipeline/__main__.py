"""`python -m contrail_pipeline JOB ...` is `contrail pipeline JOB ...`, also for spark-submit."""

import sys

from contrail_client.cli.main import run

if __name__ == "__main__":
    sys.argv.insert(1, "pipeline")
    run()
