"""Several processes that train one model together: what they add up, share out and have in common."""
