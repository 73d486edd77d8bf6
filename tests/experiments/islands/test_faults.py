"""Processes of islands that are killed, and whose store goes away."""

import pytest

faults = pytest.importorskip(
  "experiments.islands.faults", reason="obstore is missing"
)
# A run without faults ends at 0.04. It begins at 1.
MAX_ERROR = 0.1
NEEDS = {"outages": "moto.server"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", faults.CASES)
def test_islands_train_on_whatever_fails(case):
  if case in NEEDS:
    pytest.importorskip(NEEDS[case])
  try:
    found = faults.measure_case(case, seed=1, faults=3)
  except faults.NoDiskError as error:
    pytest.skip(str(error))
  assert found["error"].value < MAX_ERROR
  if case == "forged":
    assert found["refused"].value >= 1
