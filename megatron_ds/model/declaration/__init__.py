"""The declaration of the model: its parts, their weights and costs. Imports no torch."""
