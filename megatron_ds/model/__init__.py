"""The GPT model as a list of layers."""
