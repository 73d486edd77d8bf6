"""Checks of the performance model: calibration, validation, scaling study."""
