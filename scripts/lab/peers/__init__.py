"""Other runtimes beside edgespec, each in a child process of its own. `runtimes.py` says who takes part."""
