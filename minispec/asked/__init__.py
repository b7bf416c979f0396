"""What some requests ask of a step: log-probabilities, a grammar, a trace."""
