"""What training a network takes of a device's memory, and of its time."""
