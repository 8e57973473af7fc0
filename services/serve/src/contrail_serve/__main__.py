"""``python -m contrail_serve``: serve with settings from ``name=value`` arguments."""

import sys

from contrail_serve.main import main

if __name__ == "__main__":
    sys.exit(main(dict(argument.split("=", 1) for argument in sys.argv[1:])))
