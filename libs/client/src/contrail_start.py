"""Entry point of the `contrail` command: it imports nothing before Ctrl-C has a quiet end.

Importing the client takes a moment, in which Ctrl-C would otherwise end in a traceback from the
midst of an import.
"""

import os
import signal

INTERRUPTED = 130


def run() -> None:
    """Import the command and run it; from then on Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from contrail_client.cli.main import run as run_command  # noqa: PLC0415 - see above

    run_command()
