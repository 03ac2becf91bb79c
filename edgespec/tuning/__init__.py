"""Measures thoroughly and decides from it: cost curves (`calibration`), expected gains (`plan`), the best settings
(`sweep`). What it does not know: how a result is shown."""
