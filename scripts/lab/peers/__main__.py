"""`python -m peers NAME`: the child process of a runtime."""

import sys

from peers.base import main

main(sys.argv[1])
