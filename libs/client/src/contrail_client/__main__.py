"""`python -m contrail_client` is the `contrail` command."""

from contrail_client.cli.main import run

run()
