"""Training steps that are run under policies of saving."""

from experiments.residuals import steps, tables


def test_steps_have_times_and_memory():
  model = "mlp_gelu:blocks=2:width=8:rows=4"
  rows = steps.measure_steps(model, 2)
  units = {(row.case, row.metric): row.unit for row in rows}
  for policy in ("plain", "jax_block_nothing", "ours", "ours_8bits"):
    assert units[f"{model}/{policy}", "step_ms"] == "ms"
    assert units[f"{model}/{policy}", "temp_bytes"] == "bytes"
    assert units[f"{model}/{policy}", "step_ms_predicted"] == "ms"
  assert (f"{model}/ours_host", "step_ms") in units
  lines = tables.summary_table(rows).lines
  assert [line[0] for line in lines] == [
    f"{model}: {label}" for label in ("ms", "predicted, ms", "GB")
  ]
  assert not any("-" in line[1:] for line in lines)
