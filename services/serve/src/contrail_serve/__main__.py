"""``python -m contrail_serve [SERVICE] [name=value ...]``: a server command without the client."""

import sys

from contrail_serve.main import SERVICES, main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    service = arguments.pop(0) if arguments[:1] and arguments[0] in SERVICES else "serve"
    sys.exit(main(dict(argument.split("=", 1) for argument in arguments), service))
