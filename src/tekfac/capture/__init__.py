"""What is seen of forward and backward passes: hooks on the model, gradients at its layers, drawn labels."""
