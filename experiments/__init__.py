"""Experiments: commands that measure or predict what jaxmotion costs and saves.

Each folder is one subject, with the name of the library's room or of the page
in `docs`:

* `train`, `hosts`: training with exchanged gradients, in one process or on
  hosts with a limited link;
* `weights`, `state`, `residuals`, `activations`: memory of training, and bytes
  between host and device;
* `hetero`: workers of unequal speed;
* `perfmodel`, `planner`: predicted steps, and the codecs that they advise;
* `kernels`, `codecs`: speed of single operations;
* `common`, `data`, `models`, `gpu_compile`: pieces that all of them share.

`experiments/README.md` lists the commands; `experiments.tables` prints the
tables of the docs from their rows.
"""
