"""The composition root: configuration, the pipeline, training."""
