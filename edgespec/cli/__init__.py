"""The command line: parses, calls the runtime, prints. One module per command."""
