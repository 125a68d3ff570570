"""Commands: prepare data, plan memory, train, evaluate."""
