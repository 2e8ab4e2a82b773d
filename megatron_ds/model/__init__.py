"""The GPT model, built from a list of layer specifications."""
