"""Host-resident training: codecs of weights and gradients, profiles, links."""
