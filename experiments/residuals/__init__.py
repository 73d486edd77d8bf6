"""Memory that training takes when the residuals of a network are compressed.

`experiments.residuals.paper` has the figures of Layrub and Layup beside ours.
"""
