"""Memory of an optimizer's update with encoded state, compiled for a GPU."""
