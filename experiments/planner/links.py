"""Predicts on which links compressing the gradient makes a step shorter.

  python -m experiments.planner.links --json=results/planner_links.jsonl

Each of 8 GPUs holds the whole network. `planner.advise` chooses a codec for
each tensor, or none, on every link of `LINKS`. Metrics, of a network on a link:
  step_ms_predicted     a step by the plan; baseline: without compression;
  compute_ms_predicted  a step that exchanges nothing;
  wire_bytes_predicted  what one GPU sends in a step by the plan;
  plan                  the codecs of the plan.
Nothing is run or measured: figures follow from datasheets and from assumptions,
such as the latencies of `LINKS`. Error bounds are the codecs' own, so that
codecs below 8 bits are not chosen.
"""

import collections
import dataclasses

from absl import flags

from experiments import models
from experiments.common import console, list_flags, records, shared_flags
from experiments.planner import rows as planner_rows
from jaxmotion import codecs, perfmodel, planner

LINKS = {
  name: perfmodel.Link(latency_s=latency_s, rate=rate)
  for name, latency_s, rate in (
    ("WAN, 1 Gbit/s, 20 ms", 2e-2, perfmodel.gbit_per_s(1)),
    ("Ethernet, 10 Gbit/s", 5e-5, perfmodel.gbit_per_s(10)),
    ("Ethernet, 25 Gbit/s", 5e-5, perfmodel.gbit_per_s(25)),
    ("Ethernet, 100 Gbit/s", 5e-5, perfmodel.gbit_per_s(100)),
    ("PCIe 5.0 x16", 5.7e-6, perfmodel.gbyte_per_s(64)),
    ("NVLink", 3.4e-6, perfmodel.gbyte_per_s(450)),
  )
}
"""Links from GPU to GPU: nominal rates each way, latencies assumed."""

# Networks, and examples of a step on each GPU.
NETWORKS = {"gpt": 8, "resnet50": 64}

_NETWORKS = list_flags.define_names(
  "networks", NETWORKS, NETWORKS, "Networks to predict."
)
_SHARE = flags.DEFINE_float(
  "peak_share", 0.5, "Share of the peak that matmuls reach.", 1e-9, 1
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Predicts every network on every link, prints a table and writes rows."""
  rows = []
  for network in _NETWORKS.value:
    rows += predict_network(network, NETWORKS[network], _SHARE.value)
  console.make_console().print(planner_rows.links_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


def make_platform(
  link: perfmodel.Link, peak_share: float
) -> perfmodel.Platform:
  """Returns 8 H100 GPUs with one link each."""
  node = perfmodel.builtin_platform("h100_node")
  rates = node.device.matmul_flops_per_s
  device = dataclasses.replace(
    node.device,
    matmul_flops_per_s={k: peak_share * v for k, v in rates.items()},
  )
  axis = perfmodel.Axis(name="data", workers=8, link=link)
  return dataclasses.replace(
    node, name="8 H100", device=device, axes=(axis,), sources={}
  )


def predict_network(
  network: str, batch_size: int, peak_share: float, **options: float
) -> list[records.Row]:
  """Returns the rows of one network on every link."""
  net = models.make_network(network, **options)
  cost = perfmodel.trace_step(net.loss, net.params, (net.batch(batch_size),))
  case = f"{network}, {net.size / 1e6:.0f} M parameters, batch {batch_size}"
  machine = f"8 H100, {peak_share:g} of the peak: predicted"
  rows = []
  for name, link in LINKS.items():
    platform = make_platform(link, peak_share)
    plan = planner.advise(cost, net.params, (), platform)
    plain_ms = 1e3 * plan.uncompressed.total_s
    step_ms = 1e3 * plan.step.total_s
    compute_ms = 1e3 * (plan.uncompressed.total_s - plan.uncompressed.exposed_s)
    one = records.Measured
    for metric, measured, baseline in (
      ("step_ms_predicted", one(step_ms, "ms"), plain_ms),
      ("compute_ms_predicted", one(compute_ms, "ms"), None),
      ("wire_bytes_predicted", one(plan.step.wire_bytes, "bytes"), None),
      ("plan", one(describe_plan(plan), "text"), None),
    ):
      key = ("planner_links", f"{case}: {name}", metric)
      row = records.make_row(*key, measured, baseline, machine=machine)
      rows.append(row)
  return rows


def describe_plan(plan: planner.ExchangePlan) -> str:
  """Returns the codecs of a plan, that of most tensors first."""
  counts = collections.Counter(choice.codec for choice in plan.choices)
  if set(counts) == {codecs.identity()}:
    return "do not compress"
  return ", ".join(
    f"{_name_codec(codec)}: {count}" for codec, count in counts.most_common()
  )


def _name_codec(codec: codecs.Codec) -> str:
  if codec == codecs.identity():
    return "none"
  return planner.format_codec(codec)


if __name__ == "__main__":
  shared_flags.run_main(main)
