"""From logits to tokens: sampling state, tables of it, log-probabilities."""
