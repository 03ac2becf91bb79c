"""Benchmark pairs: the demo at the cost of bigger models, in many shapes and formats, for our measurements."""
