"""Networks of the experiments: pure functions of pytrees.

This folder is the one place where an architecture is described. A network is a
chain of stages; `make_network` returns it. `staged` builds Flax modules
from the same layers.

A stage's block is `block(params, x) -> x`; one that repeats has stacked
parameters and is run by `lax.scan`. An experiment that saves memory wraps each
block: `net.loss(params, batch, wrap=...)`. Everything is float32 with channels
last. Batch norm uses the batch's own statistics and keeps none, and there is no
dropout, so that a block depends on its parameters and its input alone.
"""

from experiments.models.catalog import (
  NETWORKS as NETWORKS,
  make_network as make_network,
)
from experiments.models.network import (
  Block as Block,
  Network as Network,
  Stage as Stage,
  Wrap as Wrap,
  cross_entropy as cross_entropy,
  scan_block as scan_block,
)
from experiments.models.resnet import (
  DEPTHS as DEPTHS,
  block_kind as block_kind,
  count_layers as count_layers,
)
