"""Commands: prepare data, train, evaluate."""
