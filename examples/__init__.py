"""Scripts in the style of trainers that people have, before and after."""
