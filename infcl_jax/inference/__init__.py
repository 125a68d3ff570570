"""Trained and pretrained models, to encode images and texts."""
