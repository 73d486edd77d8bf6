from tests.paths import ROOT
from tests.planted_faults import FAULTS, find_file


def test_every_fault_can_be_planted_in_one_place():
  assert len(FAULTS) >= 20
  for fault in FAULTS.values():
    assert find_file(fault, ROOT).exists()
    assert fault.wrong != fault.right
