"""Memory that training takes when the residuals of a network are compressed.

`networks` has the figures of Layrub and Layup beside ours.
"""
