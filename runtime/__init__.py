"""Running a plan: local modules, parameters as DTensors, pipeline, and the module the training loop holds."""
