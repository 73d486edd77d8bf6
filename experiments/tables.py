"""Prints the tables of the README from rows.

python -m experiments.tables docs/results/digits.jsonl
"""

import sys

from experiments.common.records import Row, read_rows
from experiments.hetero import tables as unequal

_CDMA = {
  "sparsity": "zeros",
  "rle_nhwc_ratio": "run lengths",
  "rle_nchw_ratio": "channels first",
  "zvc32_ratio": "ZVC, 32-bit words",
  "zero_value_ratio": "`zero_value`",
  "zvc16_ratio": "ZVC, bf16 words",
  "zero_value_bf16_ratio": "`zero_value` of bf16",
  "planes_zlib_ratio": "byte planes and zlib",
}
_MODES = {
  "jax_checkpoint": "`jax.checkpoint`",
  "cut": "lossless",
  "cut_together": "lossless, together",
  "cut_int4": "4 bits",
  "cut_int4_together": "4 bits, together",
  "update_int4_host": "4 bits on the host",
  "everything": "everything",
}
_BENCH = {
  "encode_copies": "encode, copies",
  "update_ratio": "decode + mean + update",
  "vector_ratio": "the same, a vector",
  "leaves64_ratio": "64 leaves",
  "leaves256_ratio": "256 leaves",
}


def markdown(rows: list[Row]) -> str:
  """The table that the README shows of these rows.

  Args:
    rows: of one experiment.
  """
  if rows[0].experiment == "bench_codecs":
    return _bench_table(rows)
  if rows[0].experiment == "layrub":
    return _memory_table(rows)
  if rows[0].experiment == "cdma":
    return _activations_table(rows)
  if rows[0].experiment.startswith("residual_accuracy"):
    return _residuals_table(rows)
  if rows[0].experiment.startswith("hetgrad"):
    return _unequal_table(rows)
  if rows[0].experiment.startswith("hosts"):
    return _hosts_table(rows)
  if rows[0].experiment.startswith("a2dtwp"):
    return _weights_table(rows)
  return _training_table(rows)


def _training_table(rows: list[Row]) -> str:
  found = {(row.case, row.metric): row for row in rows}
  scores = [row for row in rows if row.metric in ("test_accuracy",)]
  lines = [
    "| exchange | test accuracy, % | to fp32, points | bytes a step | ratio "
    "| step, ms | at 100 Mbit/s, ms | at 1 Gbit/s | at 10 Gbit/s |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for row in scores:
    case = row.case
    assert row.baseline is not None
    cells = [
      case,
      f"{row.value:.2f} ± {row.noise:.2f}",
      f"{float(row.value) - row.baseline:+z.2f}",
      f"{found[case, 'wire_bytes_compiled'].value:,}",
      f"{found[case, 'wire_ratio'].value:.2f}",
      f"{found[case, 'step_ms'].value:.1f}",
    ]
    for link in ("100mbit", "1gbit", "10gbit"):
      cells.append(f"{found[case, f'exchange_ms_{link}'].value:.3g}")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _bench_table(rows: list[Row]) -> str:
  found = {(row.case, row.metric): row for row in rows}
  metrics = [m for m in _BENCH if any(row.metric == m for row in rows)]
  lines = [
    f"| codec | {' | '.join(_BENCH[m] for m in metrics)} |",
    f"|---|{'---|' * len(metrics)}",
  ]
  for case in dict.fromkeys(row.case for row in rows):
    cells = []
    for metric in metrics:
      row = found.get((case, metric))
      cells.append("" if row is None else f"{row.ratio:.2f}")
    lines.append(f"| {case} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _activations_table(rows: list[Row]) -> str:
  found = {(row.case, row.metric): row for row in rows}
  lines = [
    f"| network | {' | '.join(_CDMA.values())} |",
    f"|---|{'---|' * len(_CDMA)}",
  ]
  cases = [row.case for row in rows if row.metric == "planes_zlib_ratio"]
  for case in [c for c in cases if "_step" not in c]:
    cells = [f"{float(found[case, metric].value):.2f}" for metric in _CDMA]
    lines.append(f"| {case} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _memory_table(rows: list[Row]) -> str:
  temp = {row.case: row for row in rows if row.metric == "temp_bytes"}
  lines = [
    f"| network, batch | plain, MiB | {' | '.join(_MODES.values())} |",
    f"|---|---|{'---|' * len(_MODES)}",
  ]
  for case in [c for c in temp if c.endswith("/plain") and c.count("/") == 1]:
    place = case.removesuffix("/plain")
    cells = [
      place.replace("_batch", ", "),
      f"{float(temp[case].value) / 2**20:.0f}",
    ]
    for mode in _MODES:
      row = temp.get(f"{place}/{mode}")
      saved = (
        None if row is None or row.ratio is None else 100 * (1 - row.ratio)
      )
      cells.append("" if saved is None else f"{saved:.1f} %")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _residuals_table(rows: list[Row]) -> str:
  found = {(row.experiment, row.case, row.metric): row for row in rows}
  lines = [
    "| network | residuals | test accuracy, % | to fp32, points "
    "| error of the first gradient |",
    "|---|---|---|---|---|",
  ]
  for row in [row for row in rows if row.metric == "test_accuracy"]:
    assert row.baseline is not None
    error = found[row.experiment, row.case, "gradient_error"]
    cells = [
      row.experiment.removeprefix("residual_accuracy_"),
      row.case,
      f"{row.value:.2f} ± {row.noise:.2f}",
      f"{float(row.value) - row.baseline:+z.2f}",
      f"{float(error.value):.2g}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _hosts_table(rows: list[Row]) -> str:
  found = {(row.case, row.metric): row for row in rows}
  lines = [
    "| exchange | step, ms | over fp32 | T / T* | fewer bytes |",
    "|---|---|---|---|---|",
  ]
  for case in dict.fromkeys(row.case for row in rows):
    step = found[case, "step_ms"]
    cells = [case, f"{step.value:.1f} ± {step.noise:.1f}"]
    for metric in ("speedup", "ideal_ratio", "wire_ratio"):
      row = found.get((case, metric))
      cells.append("" if row is None else f"{row.value:.2f}")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _weights_table(rows: list[Row]) -> str:
  found = {(row.case, row.metric): row for row in rows}
  lines = [
    "| weights and gradients | test accuracy, % | to fp32, points "
    "| fewer bytes to the device | and back | steps to error "
    "| batch of VGG-A, predicted | time to error, predicted |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for row in [row for row in rows if row.metric == "test_accuracy"]:
    assert row.baseline is not None
    cells = [
      row.case,
      f"{row.value:.2f} ± {row.noise:.2f}",
      f"{float(row.value) - row.baseline:+z.2f}",
      f"{found[row.case, 'sent_ratio'].value:.2f}",
      f"{found[row.case, 'returned_ratio'].value:.2f}",
    ]
    steps = found.get((row.case, "steps_to_error"))
    cells.append("never" if steps is None else f"{steps.value:.0f}")
    for metric in ("batch_ms", "time_to_error"):
      cell = found.get((row.case, f"predicted_x86_{metric}"))
      cells.append("never" if cell is None else f"{cell.ratio:.3f}")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _unequal_table(rows: list[Row]) -> str:
  found, headers = unequal.cells(rows), unequal.HEADERS
  lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
  for name in unequal.experiments_of(rows):
    for case in unequal.CASES:
      cells = unequal.line(found, name, case)
      lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def main(paths: list[str]) -> None:
  """Prints a table for each file of rows."""
  for path in paths:
    print(markdown(read_rows(path)))


if __name__ == "__main__":
  main(sys.argv[1:])
