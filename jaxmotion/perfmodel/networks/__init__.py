"""Describes reference networks as lists of layers."""

from jaxmotion.perfmodel.networks._network import (
  IMAGES as IMAGES,
  LABELS as LABELS,
  Layer as Layer,
  Network as Network,
)
from jaxmotion.perfmodel.networks._zoo import (
  reference_network as reference_network,
)
