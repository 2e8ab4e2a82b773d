"""What `import megatron_ds` offers to Python programs and notebooks: models, trainings, plans."""
