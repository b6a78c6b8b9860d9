"""What the engine examples share: models with random weights, workloads, the logits check, profiles, reports."""
