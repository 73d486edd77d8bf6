"""Calls of the calibration, which would compile and time programs."""

UNCALLED = {
  "calibration.calibrate_platform": "it times; tests/calibration calls it",
  "calibration.extend.*": "`calibrate_platform` has checked what they get",
  "calibration.extend.ProbeTimer*": "`prepare_timer` makes it",
}
