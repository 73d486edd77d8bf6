import pytest

from experiments.hosts import links as hosts_links
from experiments.islands import links

REFUSAL = hosts_links.explain_refusal()


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_islands_train_while_their_changes_travel():
  pytest.importorskip("moto.server", reason="moto[server] is missing")
  pytest.importorskip("obstore")
  setting = dict(every=20, step_ms=100, rounds=1)
  found = links.measure_link("100mbit", 0.0, 20, 2, **setting)
  assert 0 < found["utilization"].value <= 1
  # Beside the change there are listings, more of them on a busy machine.
  sent, predicted = (
    found[f"{name}_bytes"].value for name in ("wire", "predicted")
  )
  assert predicted < sent < 1.05 * predicted
