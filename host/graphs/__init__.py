"""The three networks of the model in plain torch, with the checkpoint's parameter names."""
