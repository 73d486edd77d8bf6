"""Figures that the authors of cDMA published.

Rhu et al., *Compressing DMA Engine: Leveraging Activation Sparsity for Training
Deep Neural Networks*, 2017, arXiv:1705.01626: AlexNet, OverFeat, NiN, VGG,
SqueezeNet and GoogLeNet trained on ImageNet.
"""

SOURCE = "arXiv:1705.01626"
MEAN_RATIO = 2.6
"""Mean ratio of zero-value coding over networks, layers and training."""
MAX_RATIO = 13.8
"""Greatest ratio of zero-value coding of a layer."""
MEAN_GAIN = 32.0
"""Mean over networks of the per cent that offloading gains by compression."""
MAX_GAIN = 61.0
"""Greatest gain of a network, in per cent."""
