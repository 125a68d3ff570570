"""Trained and pretrained models: encoding of images and texts, classifiers, exact search, feature files."""
