import pytest

from experiments.common import records
from experiments.islands import simulate, tables
from experiments.islands.events import Setting, simulate_islands

MODEL = simulate.MODELS["10m"]


def make_setting(islands, **changes):
  return simulate.make_setting(MODEL, islands, 0.15)._replace(**changes)


@pytest.mark.parametrize("scheme", simulate.SCHEMES)
def test_equal_islands_that_never_fail_lose_little(scheme):
  setting = make_setting(10, failures=0.0, spread=0.0)
  # The change that is sent last is lost, and DiLoCo waits for its transfers.
  assert 0.98 < simulate.SCHEMES[scheme](setting).goodput <= 1


def test_islands_keep_most_steps_while_others_wait():
  found = {
    scheme: run(make_setting(100)).goodput
    for scheme, run in simulate.SCHEMES.items()
  }
  assert found["islands"] >= 0.88
  assert found["islands"] > 10 * max(found["diloco"], found["data_parallel"])


@pytest.mark.parametrize("scheme", simulate.SCHEMES)
def test_more_failures_cost_more_and_the_seed_decides_all(scheme):
  run = simulate.SCHEMES[scheme]
  found = [run(make_setting(10, failures=f)) for f in (0.0, 0.5, 1.0, 4.0)]
  goodputs = [one.goodput for one in found]
  assert goodputs == sorted(goodputs, reverse=True)
  assert all(0 <= one <= 1 for one in goodputs)
  assert run(make_setting(10)) == run(make_setting(10)) == found[2]
  assert run(make_setting(10, seed=1)) != found[2]


def test_each_island_reads_the_changes_of_all_others():
  setting = make_setting(10, failures=0.0, spread=0.0)
  found = simulate_islands(setting)
  rounds = 3600 / setting.every
  # Snapshots are written, and nobody reads them.
  snapshots = rounds / setting.snapshot_rounds / setting.islands
  sent = rounds + snapshots * setting.snapshot_s / setting.payload_s
  assert found.upload_payloads == pytest.approx(sent, rel=0.02)
  assert found.download_payloads == pytest.approx(9 * rounds, rel=0.02)


def test_a_dead_island_is_waited_for_once():
  # Two islands, no restarts, and no steps while a change waits.
  setting = Setting(
    *(2, 24.0, 1.0, 0.1, 1.0, 1.0, 60, 0, 10),
    failures=0.02,
    restart_s=1e9,
    spread=0.0,
  )
  shorter = simulate_islands(setting._replace(grace_s=6.0)).goodput
  longer = simulate_islands(setting._replace(grace_s=600.0)).goodput
  assert 0 < shorter - longer < 2 * 600 / (2 * 24 * 3600)


def test_a_quorum_that_is_never_there_counts_nothing():
  assert simulate_islands(make_setting(2, quorum=3)).goodput == 0


def test_the_table_has_a_line_for_each_scheme():
  setting = make_setting(2, hours=1.0)
  cases = {
    f"10m/2/{scheme}": simulate.measure_scheme(scheme, MODEL, setting)
    for scheme in simulate.SCHEMES
  }
  rows = records.make_rows("islands_simulated", cases, machine="simulated")
  lines = tables.summary_table(rows).lines
  assert [line[2] for line in lines] == list(simulate.SCHEMES)
