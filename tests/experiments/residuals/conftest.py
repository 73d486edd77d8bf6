from collections.abc import Iterator

import pytest

from experiments.models import catalog
from tests.experiments.tiny_network import make_tiny


@pytest.fixture(scope="package", autouse=True)
def tiny_network() -> Iterator[None]:
  """Adds the network `tiny` to those that `make_network` knows."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(catalog.NETWORKS, "tiny", make_tiny)
    yield
