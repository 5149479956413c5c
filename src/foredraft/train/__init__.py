"""Training of draft heads: texts with the target's hidden states, how they are made, and the training itself."""
