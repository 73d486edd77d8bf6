"""Ways to start a training job on every host of a cluster."""
