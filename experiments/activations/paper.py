"""What cDMA's authors published, to stand beside what is measured here.

Rhu et al., *Compressing DMA Engine: Leveraging Activation Sparsity for Training
Deep Neural Networks*, 2017, arXiv:1705.01626: AlexNet, OverFeat, NiN, VGG,
SqueezeNet and GoogLeNet trained on ImageNet.
"""

SOURCE = "arXiv:1705.01626"
MEAN_RATIO = 2.6
"""Of zero-value coding, over networks, layers and training."""
MAX_RATIO = 13.8
"""Of a layer."""
MEAN_GAIN = 32.0
"""Per cent by which offloading is faster than without compression."""
MAX_GAIN = 61.0
"""Of a network."""
