"""Moving a running group's offsets to any point, with the results that this supersedes: plan, apply, undo, verify."""
