"""`python -m contrail_client` is the `contrail` command."""

from contrail_start import run

run()
