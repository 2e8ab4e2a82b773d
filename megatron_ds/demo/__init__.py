"""The complete path on one machine, from text to a trained model, as commands for users."""
