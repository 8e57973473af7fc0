"""The tree of commands of `contrail pipeline`; each module of a job declares its own."""

from typing import Final

from contrail_client.cli import tree
from contrail_pipeline import archive, erase, restore
from contrail_pipeline.audit.command import audit
from contrail_pipeline.job import job_command
from contrail_pipeline.summary import command as summary
from contrail_pipeline.transform.command import transform

app: Final = tree.group("Jobs on whole streams, which run with Spark.")
job_command(app, "audit")(audit)
job_command(app, "transform")(transform)
for job in (archive, erase, restore, summary):
    job.register(app)
