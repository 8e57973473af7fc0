"""The health check: status 0 if the service answers and can write to its data folder."""

import os
import socket
import sys
import urllib.request
from typing import Final

TIMEOUT_S: Final = 3.0
SERVICES: Final = {"serve": 7420, "storage": 7422, "api": 7420, "gateway": 7421}
DAEMONS: Final = {
    "spark-master": ("SPARK_MASTER_WEBUI_PORT", 8080),
    "spark-worker": ("SPARK_WORKER_WEBUI_PORT", 8081),
}


def address(service: str) -> str | None:
    """The URL to request, from this container's settings; None for a job."""
    if service in SERVICES:
        port = os.environ.get("CONTRAIL_PORT", SERVICES[service])
        return f"http://127.0.0.1:{port}/livez"
    if service in DAEMONS:
        variable, default = DAEMONS[service]
        # Spark binds the name it is reached by, not loopback.
        host = os.environ.get("SPARK_LOCAL_HOSTNAME") or socket.gethostname()
        return f"http://{host}:{os.environ.get(variable, default)}/"
    return None


def main() -> int:
    """Check once; print the reason of a failure to stderr, where `docker inspect` shows it."""
    folder = os.environ.get("CONTRAIL_DATA_DIR", ".")
    # A mount may belong to another user, or be read-only. A full disk is for /readyz to tell.
    if not os.access(folder, os.W_OK | os.X_OK):
        print(f"{folder}: user {os.getuid()} cannot write here", file=sys.stderr)
        return 1
    url = address(os.environ["SERVICE"])
    if url is None:
        return 0
    # A proxy of the environment has no business with this container's own address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S):
            return 0
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
