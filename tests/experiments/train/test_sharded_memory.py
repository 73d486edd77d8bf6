"""Memory and bytes of sharded parameters, read from compiled programs."""

from experiments.common import records
from experiments.train import rows as train_rows
from tests.experiments import jobs


def test_codecs_cut_what_sharded_parameters_send_and_sharding_what_is_held(
  tmp_path,
):
  path = tmp_path / "rows.jsonl"
  done = jobs.run_module("train.sharded_memory", "--width=64", f"--json={path}")
  assert done.returncode == 0, done.stderr
  rows = records.read_rows(path)
  values = {(row.case, row.metric): row.value for row in rows}
  whole, part = (values[c, "held"] for c in ("replicated", "float32"))
  assert 3.9 < whole / part < 4.1
  exact, coded, kept = (
    values[f"hosts_{name}", "hosts"]
    for name in ("float32", "int8_int4", "int8_int4_local")
  )
  assert exact > 3 * coded > 3 * kept
  table = train_rows.summary_table(rows)
  assert [line[0] for line in table.lines] == list(
    dict.fromkeys(row.case for row in rows)
  )
