"""Measurements ahead of time: cost curves (`calibration`), expected speedups (`plan`), the best settings (`sweep`), and
the check that speculation does not change the output (`verify`). The command line shows the results."""
