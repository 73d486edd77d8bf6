"""Memory that training takes when the residuals of a network are compressed.

The first subject is that of Layrub and Layup; see `experiments.residuals.paper`.
"""
