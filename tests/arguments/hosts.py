"""What CPU hosts need: other rooms call it with what they have checked."""

UNCALLED = {"hosts.*": "other rooms check what they give to it"}
