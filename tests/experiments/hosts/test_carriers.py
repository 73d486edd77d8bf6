"""Collectives alone move the rows that their names say."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from experiments.hosts.carriers import CARRIERS, is_carrier, make_carrier
from experiments.hosts.cases import check_case

HOSTS = 3
MESH = Mesh(
  np.array(jax.devices()[:HOSTS]), ("data",), axis_types=(AxisType.Auto,)
)


def test_turns_of_one_row_receive_what_an_all_to_all_receives():
  found = {}
  for kind in ("alltoall", "shifts"):
    send, words = make_carrier(MESH, f"carry_{kind}_1kib")
    own = np.arange(words.size, dtype=np.uint32).reshape(words.shape)
    rows = np.asarray(send(own)).reshape(HOSTS, HOSTS, -1)
    # A host's rows in the order in which they arrive.
    found[kind] = [sorted(map(tuple, host)) for host in rows]
  assert found["alltoall"] == found["shifts"]


@pytest.mark.parametrize("kind", CARRIERS)
def test_hosts_send_the_bytes_of_the_name(kind):
  _, words = make_carrier(MESH, f"carry_{kind}_12kib")
  per_host = words.nbytes / HOSTS
  share = {"sum": 4 / 3, "gather": 2, "alltoall": 2 / 3, "shifts": 2 / 3}[kind]
  np.testing.assert_allclose(per_host * share, 12 * 1024)


def test_names_that_are_no_collectives_are_refused():
  assert check_case("carry_sum_64kib")
  assert not is_carrier("carry_swap_64kib")
  with pytest.raises(ValueError, match="got 'carry_swap_64kib'"):
    check_case("carry_swap_64kib")
