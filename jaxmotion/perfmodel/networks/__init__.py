"""Types that describe a network as a list of layers."""

from jaxmotion.perfmodel.networks._network import (
  IMAGES as IMAGES,
  LABELS as LABELS,
  Layer as Layer,
  Network as Network,
)
