"""The method: Algorithm 1 of the paper, its objective Q, and the look-ahead that evaluates it."""
