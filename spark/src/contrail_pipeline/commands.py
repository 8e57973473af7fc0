"""The tree of commands of `contrail pipeline`."""

from typing import Final

from contrail_client.cli import tree
from contrail_pipeline.archive.command import archive
from contrail_pipeline.audit.command import audit
from contrail_pipeline.compact.command import compact
from contrail_pipeline.erase.command import erase
from contrail_pipeline.iceberg.command import iceberg
from contrail_pipeline.job import job_command
from contrail_pipeline.restore.command import restore
from contrail_pipeline.summary.command import summary
from contrail_pipeline.transform.command import transform

app: Final = tree.group("Jobs on whole streams, which run with Spark.")
job_command(app, "archive")(archive)
job_command(app, "audit")(audit)
job_command(app, "compact")(compact)
job_command(app, "erase")(erase)
job_command(app, "iceberg", spark=False)(iceberg)
job_command(app, "restore")(restore)
job_command(app, "summary")(summary)
job_command(app, "transform")(transform)
